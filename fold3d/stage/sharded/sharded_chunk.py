"""ShardedChunk: what one chunk does differently whose weights are spread over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.sharded.border_parts import BorderParts
from fold3d.stage.sharded.shard_reads import ShardReads
from fold3d.stage.sharded.sub_pipeline import SubPipeline
from fold3d.tensor_parallel.kept.kept_run import KeptRun
from fold3d.tensor_parallel.kept.kept_sums import KeptSums


class ShardedChunk:
    """A ChunkSharding of one chunk; all ranks of the group make the same calls."""

    def __init__(
        self,
        index: int,
        parts: BorderParts | None,
        sub: SubPipeline,
        sums: KeptSums,
        reads: ShardReads,
        in_halves: Callable[[], bool],
    ) -> None:
        """Args:
        parts: None where nothing travels between stages.
        sums: what its modules communicate by.
        in_halves: whether micro-batches of the step under way run in halves.
        """
        self._index, self._parts, self._sub, self._in_halves = index, parts, sub, in_halves
        self._sums, self._reads = sums, reads
        self._first: KeptRun | None = None
        self._repeated: KeptRun | None = None

    @contextmanager
    def first(self, run: KeptRun) -> Iterator[None]:
        """Around a run that is repeated later: what it gets from the other ranks is kept in `run`."""
        self._first = run
        try:
            with self._sums.first(run):
                yield
        finally:
            self._first = None

    @contextmanager
    def again(self, run: KeptRun) -> Iterator[None]:
        """Around the run that repeats it."""
        self._repeated = run
        try:
            with self._sums.again(run):
                yield
        finally:
            self._repeated = None

    def watched(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Around the loss function's code. Raises: ConfigError, in it, where that reads parts of weights."""
        return self._reads.watched()

    def receive(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what the chunk before returned, of what this rank received of it."""
        return self._parts.receive(self._index, tensors) if self._parts is not None and self._index else tensors

    def send(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what this rank sends of what the chunk returned."""
        return self._parts.send(self._index, tensors) if self._parts is not None and tensors else tensors

    def run(self, micro_batch: MicroBatch, received: list[Tensor]) -> tuple[list[Tensor], Any] | None:
        """Returns what the chunk returns for the micro-batch in halves; None: it is to run whole."""
        if self._repeated is not None:  # as it ran before, whatever was found out about micro-batches since
            return self._sub.run(micro_batch, received, again=True) if self._repeated.in_parts else None
        done = self._sub.run(micro_batch, received) if micro_batch.trains and self._in_halves() else None
        if self._first is not None:
            self._first.ran(in_parts=done is not None)
        return done
