"""PipelineChunk: one (segment, stage) cell of the model, driven by the C++ Executor."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Protocol

import torch

from fold3d import _C
from fold3d.stage.micro_batch import MicroBatch, one_number
from fold3d.stage.once.once_per_micro_batch import OncePerMicroBatch, Run
from fold3d.stage.once.part_draws import PartDraws
from fold3d.stage.split_model import SplitModel
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.kept.kept_run import KeptRun
from fold3d.tensor_parallel.vocabulary import gathered


class ChunkSync(Protocol):
    """What a chunk tells of its forwards and backwards."""

    def before_chunk(self, chunk: int) -> None:
        """Waits for the parameters that any module of the chunk may read."""

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done."""


class ChunkSharding(Protocol):
    """What a chunk does differently whose weights are spread over a tensor-parallel group."""

    def receive(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what the chunk before returned, of what this rank received of it."""

    def send(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what this rank sends of what the chunk returned."""

    def run(self, micro_batch: MicroBatch, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any] | None:
        """Returns what the chunk returns for the micro-batch; None: it is to run as everywhere."""

    def watched(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Around a run: raises where it would not compute what one process does."""

    def first(self, run: KeptRun) -> contextlib.AbstractContextManager[None]:
        """Around a run that is repeated later: what it gets from other ranks is kept in `run`."""

    def again(self, run: KeptRun) -> contextlib.AbstractContextManager[None]:
        """Around the run that repeats it."""


class PipelineChunk:
    """Runs one chunk of a SplitModel; the methods are called by the Executor on the thread that runs the step."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        model: torch.nn.Module,
        split: SplitModel | WholeModel,
        sync: ChunkSync,
        once: OncePerMicroBatch | None,
        sharding: ChunkSharding | None = None,
        draws: PartDraws | None = None,
    ):
        """Args:
        is_last: whether it is the model's last, whose results leave the pipeline.
        once: of a process with several chunks, or of one that recomputes; None: this is the only one, and runs once.
        sharding: what is different where several ranks share its weights; None: nobody does.
        draws: where micro-batches may be parts of the user's; None: they are not.
        """
        self.index = index
        self._is_last = is_last
        self._model = model
        self._split = split
        self._sync = sync
        self._sharding = sharding
        self._once = once
        self._draws = draws

    def forward(
        self, micro_batch: MicroBatch, received: list[torch.Tensor], batch: _C.StashBatch | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        """Returns the tensors for the next chunk, and None; for the last chunk its loss (or nothing, when the result is
        no tensor), followed in training by what the model's last block returned, and the result without gradient.

        Args:
            batch: what saves the graph's tensors, which leave the device until the backward; None: they stay.
        """
        self._sync.before_chunk(self.index)
        return self._forward(micro_batch, received, "only", batch)

    def forward_first(
        self, micro_batch: MicroBatch, received: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any, list[torch.Tensor]]:
        """Does what `forward` does, where `recompute` follows; also returns what that needs beside `received`."""
        self._sync.before_chunk(self.index)
        run = micro_batch.kept[self.index] = KeptRun()
        with contextlib.nullcontext() if self._sharding is None else self._sharding.first(run):
            sent, result = self._forward(micro_batch, received, "first")
        return sent, result, run.take()

    def recompute(
        self, micro_batch: MicroBatch, received: list[torch.Tensor], kept: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns once more the tensors, or the loss, that `forward_first` returned, for the graph behind them."""
        run = micro_batch.kept.pop(self.index)
        run.give_back(kept)
        with contextlib.nullcontext() if self._sharding is None else self._sharding.again(run):
            return self._forward(micro_batch, received, "again")[0]

    def _forward(
        self, micro_batch: MicroBatch, received: list[torch.Tensor], run: Run, batch: _C.StashBatch | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        if self._sharding is not None:
            received = self._sharding.receive(received)
        around = contextlib.nullcontext() if self._once is None else self._once.around(self.index, micro_batch, run)
        draws = contextlib.nullcontext() if self._draws is None else self._draws.around(self.index, micro_batch)
        try:
            with around, _saving(batch), draws:
                sent, result = self._run(micro_batch, received)
        finally:
            ends = self._split.take_ends()
        if self._sharding is not None:
            sent = self._sharding.send(sent)
        if not self._is_last:
            return sent, None
        if micro_batch.trains:
            one_number(result)
        else:  # for code that not every rank of a tensor-parallel group runs
            result = gathered(result)
        if not isinstance(result, torch.Tensor):
            return [], result
        return [result, *(ends if run == "only" else ())], result.detach()

    def _run(self, micro_batch: MicroBatch, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        if self._sharding is None:
            return self._run_whole(micro_batch, received)
        with self._sharding.watched(micro_batch):
            return self._sharding.run(micro_batch, received) or self._run_whole(micro_batch, received)

    def _run_whole(self, micro_batch: MicroBatch, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        call = partial(micro_batch.run, self._model)
        return self._split.run(self.index, call, received, micro_batch.key, only_loss=micro_batch.only_loss)

    def reduce(self) -> None:
        """The last backward of this chunk is done."""
        self._sync.chunk_done(self.index)


def _saving(batch: _C.StashBatch | None) -> contextlib.AbstractContextManager[Any]:
    # Hooks inside of these go first: the user's own, and those of a checkpoint, whose inputs are saved outside of them.
    if batch is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(batch.save, _C.unpack_saved)
