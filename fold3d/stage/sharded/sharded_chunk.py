"""ShardedChunk: what one chunk does differently whose weights are spread over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.sharded.border_parts import BorderParts
from fold3d.stage.sharded.sub_pipeline import SubPipeline


class ShardedChunk:
    """A ChunkSharding of one chunk; all ranks of the group make the same calls."""

    def __init__(self, index: int, parts: BorderParts | None, sub: SubPipeline, in_halves: Callable[[], bool]) -> None:
        """Args:
        parts: None where nothing travels between stages.
        in_halves: whether micro-batches of the step under way run in halves.
        """
        self._index, self._parts, self._sub, self._in_halves = index, parts, sub, in_halves

    def receive(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what the chunk before returned, of what this rank received of it."""
        return self._parts.receive(self._index, tensors) if self._parts is not None and self._index else tensors

    def send(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what this rank sends of what the chunk returned."""
        return self._parts.send(self._index, tensors) if self._parts is not None and tensors else tensors

    def run(self, micro_batch: MicroBatch, received: list[Tensor]) -> tuple[list[Tensor], Any] | None:
        """Returns what the chunk returns for the micro-batch in halves; None: it is to run whole."""
        return self._sub.run(micro_batch, received) if micro_batch.trains and self._in_halves() else None
