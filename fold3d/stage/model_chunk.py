"""PipelineChunk: one (segment, stage) cell of the model, driven by the C++ Executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fold3d.stage.drawn_numbers import DrawnNumbers
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.split_model import SplitModel
from fold3d.stage.whole_model import WholeModel
from fold3d.trace import SplitError

ModelCall = Callable[[torch.nn.Module, MicroBatch], Any]
DropoutKey = tuple[int, int, int]


class ChunkSync(Protocol):
    """What DP.sync does before and after a chunk; None of it with one replica."""

    def before_chunk(self, chunk: int) -> None:
        """Waits for the parameters that any module of the chunk may read."""

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done."""


class StepInputs:
    """What all chunks of a rank share during one run: the micro-batches, the call to make, the dropout keys."""

    def __init__(self) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.call: ModelCall | None = None
        self.keys: list[DropoutKey | None] = []
        self.results: list[Any] = []
        self.drawn = DrawnNumbers()

    def set(self, micro_batches: list[MicroBatch], call: ModelCall, keys: list[DropoutKey | None]) -> None:
        """Starts a run over `micro_batches`; `keys[i]` seeds the dropout of micro-batch i, None leaves it alone."""
        self.micro_batches, self.call, self.keys = micro_batches, call, keys
        self.results = [None] * len(micro_batches)
        self.drawn = DrawnNumbers()

    def clear(self) -> None:
        """Drops the references to the run's data."""
        self.micro_batches, self.call, self.keys, self.results = [], None, [], []


class PipelineChunk:
    """Runs one chunk of a SplitModel; the methods are called by the Executor on the thread that runs the step."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        model: torch.nn.Module,
        split: SplitModel | WholeModel,
        inputs: StepInputs,
        dp_sync: ChunkSync | None,
        *,
        is_alone: bool,
    ):
        """Args:
        is_alone: whether this is the process's only chunk.
        """
        self.index = index
        self._is_alone = is_alone
        self._is_last = is_last
        self._model = model
        self._split = split
        self._inputs = inputs
        self._dp_sync = dp_sync

    def forward(self, micro_batch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors for the next chunk; for the last chunk [loss], or [] when the result is no tensor."""
        step = self._inputs
        call, batch = step.call, step.micro_batches[micro_batch]
        assert call is not None
        if self._dp_sync is not None:
            self._dp_sync.before_chunk(self.index)
        before = {} if self._is_alone else _versions(batch)
        # A shallow copy: a loss function may take labels out of the batch, and every chunk needs them.
        with contextlib.nullcontext() if self._is_alone else step.drawn.of(micro_batch):
            sent, result = self._split.run(
                self.index, lambda: call(self._model, dict(batch)), received, step.keys[micro_batch]
            )
        changed = [] if self._is_alone else [name for name, now in _versions(batch).items() if now != before[name]]
        if changed:
            raise SplitError(
                f"the loss function or the model's forward changed {changed[0]!r} of the micro-batch in place. They "
                "run once for each chunk of the model, and this process has several, so it would be changed several "
                "times: change a copy, or set segments=1"
            )
        if not self._is_last:
            return sent
        step.results[micro_batch] = result if not isinstance(result, torch.Tensor) else result.detach()
        return [result] if isinstance(result, torch.Tensor) else []

    def reduce(self) -> None:
        """The last backward of this chunk is done."""
        assert self._dp_sync is not None, "only schedules for several replicas reduce"
        self._dp_sync.chunk_done(self.index)


def _versions(batch: MicroBatch) -> dict[str, int]:
    """Returns how often each tensor was changed in place."""
    return {
        name: value._version
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }
