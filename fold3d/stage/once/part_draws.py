"""PartDraws: a part of a micro-batch draws the random numbers that the whole one would have drawn for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from fold3d.stage.micro_batch import MicroBatch
from fold3d.tensor_parallel.sub_pipelined.per_sample_random import PerSampleRandom


class PartDraws:
    """Of a process's chunks. So masks of dropout do not depend on how a micro-batch is divided.

    Where a chunk drew nothing, its next runs are left alone, until chances of dropout have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
        self._nothing: dict[int, list[float]] = {}  # chances with which a chunk drew nothing

    @contextlib.contextmanager
    def around(self, chunk: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Around a chunk's run of a part; without effect on a whole micro-batch."""
        if micro_batch.part is None:
            yield
            return
        chances = [module.p for module in self._dropouts if module.training]
        if self._nothing.get(chunk) == chances:
            yield
            return
        mode = PerSampleRandom(*micro_batch.part)
        with mode:
            yield
        if not mode.used:
            self._nothing[chunk] = chances
