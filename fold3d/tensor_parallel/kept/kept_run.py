"""KeptRun: what a run of a chunk got from the other ranks of its tensor-parallel group, for the run that repeats it."""

from __future__ import annotations

from torch import Tensor

from fold3d.errors import Fold3dError

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
