"""with_draws(): which random numbers of a block each rank needs a part of, proved by drawing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torch import nn

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import NOT_KNOWN, Slices
from fold3d.sharding.split import BlockSplit
from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.inner_results import exit_channels, placements
from fold3d.splitting.proof import BlockRuns, differ
from fold3d.tensor_parallel.random_draws import PartialDraws, Size, all_draw
from fold3d.tensor_parallel.slices import paths_of

_MOST_TRIES = 16
_CHANCE = 0.1
"""Of dropout that is proved: chances of 0 may become others later."""

_NOTHING: Size = (-1,)
"""The size of what is not drawn."""


class _DrawnSizes(PartialDraws):
    """Writes down what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Size] = []

    def whole(self, size: Size, *, draws: bool = True) -> Size | None:
        super().whole(size, draws=draws)
        self.sizes.append(size if draws else _NOTHING)
        return None

    def whole_of(self, size: Size, number: int) -> Size | None:
        return None


def with_draws(call: CapturedCall, split: BlockSplit, tp: int) -> BlockSplit:
    """Returns the split with `draws`, by which the ranks draw in training what the whole block draws.

    The block is run as in training, whole and as emulated ranks, and sizes are compared: a dimension in which they
    differ is one of units, whose entries each rank needs are those that its input channels of a region's exit belong
    to. Whatever is found is tried: with equal seeds the ranks' results must be the whole block's. Without it,
    the split as it is.
    """
    if not split.groups:
        return split
    for chance in (_CHANCE, 0.0):  # where they are not found, those that are drawn as it is
        try:
            with all_draw(chance):
                found = _found(call, split, tp)
        except (IndexError, RuntimeError, TypeError, ValueError, Fold3dError):
            continue  # ranks that draw otherwise
        if found is not None:
            return found
    return split


def _found(call: CapturedCall, split: BlockSplit, tp: int) -> BlockSplit | None:
    """Returns the split with draws; as it is where there are none; None where they were not found."""
    runs = BlockRuns(call, split, tp, training=True)
    sizes = _DrawnSizes()
    expected = dict(paths_of(runs.whole(sizes)))
    if set(sizes.sizes) <= {_NOTHING}:
        return split
    ranks = [_DrawnSizes() for _ in range(tp)]
    runs.ranks(split, ranks)
    of_ranks = zip(*(one.sizes for one in ranks), strict=True)
    per_draw = [
        list(_candidates(whole, parts, runs.block, split)) for whole, parts in zip(sizes.sizes, of_ranks, strict=True)
    ]
    for draws in islice(_likeliest(per_draw), _MOST_TRIES):
        made = replace(split, draws=draws)
        found = [dict(paths_of(output)) for output in runs.ranks(made)]
        # Of what blocks of all kinds are read for, this one may not return everything (T5's encoder and decoder).
        if not any(differ(one.get(path), expected.get(path)) for one in found for path in call.read):
            return made
    return None


def _likeliest(per_draw: Sequence[Sequence[Slices | None]]) -> Iterator[tuple[Slices | None, ...]]:
    """Yields one candidate for each draw, the likeliest first; draws with the same candidates lie alike."""
    kinds = list(dict.fromkeys(tuple(one) for one in per_draw))
    counts = [len(one) for one in kinds]
    for total in range(sum(counts) - len(counts) + 1):
        for place in _places(counts, total):
            chosen = {kind: kind[number] for kind, number in zip(kinds, place, strict=True)}
            yield tuple(chosen[tuple(one)] for one in per_draw)


def _places(counts: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yields numbers below each of `counts` that add up to `total`."""
    if not counts:
        if total == 0:
            yield ()
        return
    for number in range(min(counts[0], total + 1)):
        for others in _places(counts[1:], total - number):
            yield (number, *others)


def _candidates(whole: Size, parts: Sequence[Size], block: nn.Module, split: BlockSplit) -> Iterator[Slices | None]:
    """Yields how a draw may lie on the ranks, the likeliest first."""
    if _NOTHING in (whole, *parts):
        yield NOT_KNOWN
        return
    dims = [dim for dim, size in enumerate(whole) if any(part[dim] != size for part in parts)]
    if not dims:
        yield None
        return
    if len(dims) > 1 or any(len(part) != len(whole) for part in parts):
        return
    (dim,) = dims
    # Samples, their windows and the units may lie in one dimension: the likeliest numbers first, then any that divides.
    times = dict.fromkeys((1, *whole, *(one for one in range(1, whole[dim] + 1) if whole[dim] % one == 0)))
    for length, of_ranks in placements(whole[dim], [part[dim] for part in parts], times, exit_channels(block, split)):
        yield Slices(dim, length, of_ranks)
