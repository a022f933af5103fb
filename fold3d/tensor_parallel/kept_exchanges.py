"""KeptExchanges: what a tensor-parallel group has exchanged where code will run again is kept, so that recomputation
communicates nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fold3d.errors import Fold3dError
from fold3d.tensor_parallel.checkpoints import CheckpointMemory
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


class KeptExchanges:
    """Of one rank (Merak, section 5.3, where recomputation would double TP communication).

    It costs two activations of a layer's input for each layer that is computed again, in an activation checkpoint or
    with the whole chunk (`KeptRun`). Exchanges are told apart by the checkpoint or run that they are in and their order
    there, so the code in it must run again as it ran.
    """

    def __init__(self, turns: Turns) -> None:
        """Args:
        turns: which of several functions runs.
        """
        self._turns = turns
        self._first: KeptRun | None = None
        self._repeated: KeptRun | None = None
        self._memory = CheckpointMemory()

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

    def recall(self, make: Callable[[Tensor | None], Tensor]) -> Tensor:
        """Returns what `make` makes of what the exchange has given before, where code runs again; else, with None, what
        it gets from the other ranks, which is kept."""
        run, with_grad = self._memory.run(), torch.is_grad_enabled()
        number = 0
        if run is not None:
            number, run.calls = run.calls, run.calls + 1
        known: Tensor | None = None
        if self._repeated is not None and with_grad:
            known = self._repeated.next(self._turns.current)
        elif run is not None and run.again:
            known = run.values.get(number)
        made = make(known)
        if not with_grad:
            return made
        if run is not None and number not in run.values:
            # A copy: the model may add to what it gets in place.
            run.values[number] = (made if known is None else known).detach().clone()
        if known is None and self._first is not None:
            self._first.keep(self._turns.current, made)
        return made
