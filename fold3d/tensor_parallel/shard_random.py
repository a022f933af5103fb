"""ShardRandom: a rank's share of a block draws the random numbers that the whole block would have drawn for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fold3d.errors import Fold3dError
from fold3d.sharding.split import Draw
from fold3d.tensor_parallel.partial_draws import PartialDraws, Size
from fold3d.tensor_parallel.slices import indices_of


class ShardRandom(PartialDraws):
    """While it is entered, around one call of a block, draw k is `draws[k]` (`BlockSplit.draws`): its units' part of
    what all ranks draw alike, or what all ranks draw alike.

    A draw in a region that was not there when the block was split, or has another form now, is an error: nobody knows
    whose units it is for. Outside of regions all ranks compute the same, and draw it as it is.
    """

    def __init__(self, draws: Sequence[Draw | None], rank: int, in_region: Callable[[], bool]) -> None:
        """Args:
        in_region: whether what runs is computed by each rank for its share of units.
        """
        super().__init__()
        self._draws, self._rank, self._in_region = draws, rank, in_region
        self._taken: Draw | None = None
        self._times = 1

    def whole_of(self, size: Size, number: int) -> Size | None:
        if number >= len(self._draws):
            self._refuse_inside(size, number)
            return None
        draw = self._draws[number]
        if draw is None:
            return None
        mine = sum(end - first for first, end in draw.parts[self._rank])
        times, rest = divmod(size[draw.dim], mine) if draw.dim < len(size) else (0, 1)
        if rest:
            self._refuse_inside(size, number)
            return None
        self._taken, self._times = draw, times
        return (*size[: draw.dim], times * draw.whole, *size[draw.dim + 1 :])

    def _refuse_inside(self, size: Size, number: int) -> None:
        if self._in_region():
            raise Fold3dError(
                f"tp: random numbers of the size {tuple(size)} are drawn, as number {number + 1} in a call of the "
                f"block, by each rank for its share. When the block was divided, it drew {len(self._draws)} times, or "
                "in other sizes at this place. A block must draw alike in every call: give it a chance of 0, or set "
                "tp=1"
            )

    def part(self, drawn: Tensor) -> Tensor:
        draw, times = self._taken, self._times
        assert draw is not None, "`whole` returned a size"
        apart = drawn
        dim, runs = draw.dim + (times > 1), draw.parts[self._rank]
        if times > 1:
            apart = drawn.reshape(*drawn.shape[: draw.dim], times, draw.whole, *drawn.shape[dim:])
        if len(runs) == 1:
            taken = apart.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
        else:
            taken = apart.index_select(dim, indices_of(runs, drawn.device))
        return taken.flatten(dim - 1, dim) if times > 1 else taken
