"""KeptSums: what TP.sync has summed where code will run again is kept, so that recomputation communicates nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fold3d.errors import Fold3dError
from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint
from fold3d.tensor_parallel.region import PART, Exchange, FusedOps, RegionOps
from fold3d.tensor_parallel.turns import Turns

Turn = int | None
"""Which of the functions that take turns (`Turns`) it was; None: there were none."""


class KeptRun:
    """Tensors in the order in which each function got them, without history."""

    def __init__(self) -> None:
        self._made: dict[Turn, list[Tensor]] = {}
        self._counts: dict[Turn, int] = {}
        self.in_parts = False
        """Whether the micro-batch ran in parts that take turns."""

    def ran(self, *, in_parts: bool) -> None:
        """The run has found out whether the micro-batch runs in parts."""
        self.in_parts = in_parts

    def keep(self, turn: Turn, made: Tensor) -> None:
        """The run that is repeated later has got `made`. A copy is kept: the model may add to what it gets in place."""
        self._made.setdefault(turn, []).append(made.detach().clone())

    def next(self, turn: Turn) -> Tensor:
        """Returns what the first run got where the one that repeats it is.

        Raises: Fold3dError when that got nothing more: the code ran otherwise.
        """
        made = self._made.get(turn)
        if not made:
            raise Fold3dError(
                "a chunk that is computed again has more sums over its tensor-parallel group than the first time: the "
                'model\'s code ran otherwise. Set recompute="none"'
            )
        return made.pop(0)

    def take(self) -> list[Tensor]:
        """Returns all that was kept, for others to hold until `give_back`."""
        made, self._made = self._made, {}
        self._counts = {turn: len(tensors) for turn, tensors in made.items()}
        return [tensor for tensors in made.values() for tensor in tensors]

    def give_back(self, tensors: list[Tensor]) -> None:
        """Holds again what `take` returned."""
        rest = list(tensors)
        for turn, count in self._counts.items():
            self._made[turn], rest = rest[:count], rest[count:]


class Keeper(Protocol):
    """KeptSums, as it is used here."""

    def known(self) -> Tensor | None:
        """Returns what was kept, where code runs again."""

    def keep(self, made: Tensor) -> None:
        """Keeps what was summed or gathered, where code runs for the first time."""


class KeptFused:
    """FusedOps over others: what they sum and gather is kept with the rest of `sums`."""

    def __init__(self, ops: FusedOps, sums: Keeper) -> None:
        self._ops, self._sums = ops, sums

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        return self._ops.copy_matmul(x, weights)

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int, known: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        kept = self._sums.known()
        whole, products = self._ops.all_gather_matmul(x, weights, dim, length, kept if known is None else known)
        if kept is None:
            self._sums.keep(whole)
        return whole, products

    def matmul_all_reduce(self, x: Tensor, weight: Tensor, known: Tensor | None = None) -> Tensor:
        kept = self._sums.known()
        total = self._ops.matmul_all_reduce(x, weight, kept if known is None else known)
        if kept is None:
            self._sums.keep(total)
        return total

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int, known: Tensor | None = None) -> Tensor:
        kept = self._sums.known()
        part = self._ops.matmul_reduce_scatter(x, weight, dim, kept if known is None else known)
        if kept is None:
            self._sums.keep(part)
        return part


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
