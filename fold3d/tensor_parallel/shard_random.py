"""ShardRandom: a rank's share of a block draws the random numbers that the whole block would have drawn for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fold3d.sharding.split import Draw
from fold3d.tensor_parallel.partial_draws import PartialDraws, Size
from fold3d.tensor_parallel.slices import indices_of


class ShardRandom(PartialDraws):
    """While it is entered, around one call of a block, draw k is `draws[k]` (`BlockSplit.draws`): its units' part of
    what all ranks draw alike, or what all ranks draw alike. A draw that was not there when the block was split is made
    as it is."""

    def __init__(self, draws: Sequence[Draw | None], rank: int) -> None:
        super().__init__()
        self._draws, self._rank = draws, rank
        self._taken: Draw | None = None
        self._times = 1

    def whole_of(self, size: Size, number: int) -> Size | None:
        draw = self._draws[number] if number < len(self._draws) else None
        if draw is None or draw.dim >= len(size):
            return None
        times, rest = divmod(size[draw.dim], sum(end - first for first, end in draw.parts[self._rank]))
        if rest:
            return None
        self._taken, self._times = draw, times
        return (*size[: draw.dim], times * draw.whole, *size[draw.dim + 1 :])

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
