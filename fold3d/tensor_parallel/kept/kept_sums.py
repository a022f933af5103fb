"""KeptSums: what TP.sync has summed where code will run again is kept, so that recomputation communicates nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint
from fold3d.tensor_parallel.fused.ops import FusedOps
from fold3d.tensor_parallel.kept.kept_fused import KeptFused
from fold3d.tensor_parallel.kept.kept_run import KeptRun
from fold3d.tensor_parallel.region import RegionOps
from fold3d.tensor_parallel.sequence.exchange import PART, Exchange
from fold3d.tensor_parallel.sub_pipelined.turns import Turns


class KeptSums:
    """RegionOps over others (Merak, section 5.3, where recomputation would double TP.sync).

    It costs two activations of a layer's input for each layer that is computed again, in an activation checkpoint or
    with the whole chunk (`KeptRun`). Sums are told apart by the checkpoint or run that they are in and their order
    there, so the code in it must run again as it ran.
    """

    def __init__(self, ops: RegionOps, turns: Turns | None = None) -> None:
        """Args:
        turns: which of several functions runs; they hand over at the same places when nothing is communicated, so that
            backward finds the same graph. None: there are none.
        """
        self.size, self.rank = ops.size, ops.rank
        self._ops, self._turns = ops, turns
        self._first: KeptRun | None = None
        self._repeated: KeptRun | None = None
        self._kept: WeakKeyDictionary[object, list[Tensor]] = WeakKeyDictionary()
        self._replayed: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()  # backward, sums so far

    @contextlib.contextmanager
    def first(self, run: KeptRun) -> Iterator[None]:
        """Around a run of a chunk: what it gets is kept in `run`."""
        self._first = run
        try:
            yield
        finally:
            self._first = None

    @contextlib.contextmanager
    def again(self, run: KeptRun) -> Iterator[None]:
        """Around the run that repeats it: it gets what was kept."""
        self._repeated = run
        try:
            yield
        finally:
            self._repeated = None

    @property
    def fused(self) -> FusedOps | None:
        return None if self._ops.fused is None else KeptFused(self._ops.fused, self)

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        return self._ops.copy_to_region(x, channels)

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        return self._ops.copy_weight(weight, dim, indices)

    def reduce_from_region(self, y: Tensor) -> Tensor:
        kept = self.known()
        if kept is not None:
            y.detach().copy_(kept)
            if self._turns is not None:
                self._turns.hand_over()
            return y
        summed = self._ops.reduce_from_region(y)
        self.keep(summed)
        return summed

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        if how.forward == PART:  # needs nobody
            return self._ops.exchange(x, how, known)
        kept = self.known()
        if kept is not None:
            return self._ops.exchange(x, how, kept.clone())
        made = self._ops.exchange(x, how, known)
        self.keep(made)
        return made

    def scatter_to_sequence_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of `x`, the same on every rank; the gradient is gathered."""
        return self.exchange(x, Exchange.scatter(dim, x.shape[dim]))

    def gather_from_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns everybody's `x`, as long as this one, one after the other along `dim`; the gradient, the same on
        every rank, is parted."""
        return self.exchange(x, Exchange.gather(dim, x.shape[dim] * self.size, sums=False))

    def known(self) -> Tensor | None:
        """Returns what was kept, where backward runs a checkpoint again, or a chunk runs again."""
        frame = frame_of_checkpoint()
        if self._repeated is not None and torch.is_grad_enabled():
            made = self._repeated.next(self._turn)
            self._keep_for(frame, made)
            return made
        backward = torch._C._current_graph_task_id()
        kept = None if frame is None else self._kept.get(frame)
        if frame is None or backward == -1 or kept is None:
            return None
        of, number = self._replayed.get(frame, (backward, 0))
        number = number if of == backward else 0
        self._replayed[frame] = (backward, number + 1)
        return kept[number]

    def keep(self, made: Tensor) -> None:
        """Keeps what was summed or gathered, where code runs for the first time."""
        if not torch.is_grad_enabled():
            return
        self._keep_for(frame_of_checkpoint(), made)
        if self._first is not None:
            self._first.keep(self._turn, made)

    def _keep_for(self, frame: object | None, made: Tensor) -> None:
        if frame is not None:
            # A copy: the model may add to what it gets in place.
            self._kept.setdefault(frame, []).append(made.detach().clone())

    @property
    def _turn(self) -> int | None:
        return None if self._turns is None else self._turns.current
