"""placements(): where the units of a rank may lie in a tensor, by how large it is on the ranks and as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fold3d.sharding.shard import Runs, Shard, runs_of
from fold3d.sharding.split import BlockSplit
from fold3d.tensor_parallel.linear import is_linear, is_transposed

Channels = tuple[int, Sequence[Sequence[int]]]
"""How many channels there are, and those of each rank, one for each of its units or more."""


def placements(
    whole: int, parts: Sequence[int], times: Iterable[int], channels: Iterable[Channels]
) -> Iterator[tuple[int, tuple[Runs, ...]]]:
    """Yields (period, each rank's indices within one period) for a dimension of `whole` entries, of which the ranks
    have so many, the likeliest first.

    Args:
        times: how often the units may lie in it, as where samples and heads lie in one dimension.
    """
    seen = set()
    known = list(channels)
    for often in times:
        period, rest = divmod(whole, often)
        if rest:
            continue
        for count, of_ranks in known:
            if count % period:
                continue
            indices = [sorted({channel * period // count for channel in mine}) for mine in of_ranks]
            if any(len(mine) * often != part for mine, part in zip(indices, parts, strict=True)):
                continue
            found = period, tuple(runs_of(mine) for mine in indices)
            if found not in seen:
                seen.add(found)
                yield found


def exit_channels(block: nn.Module, split: BlockSplit) -> Iterator[Channels]:
    """Yields the input channels of each region's exits."""
    for group in split.groups:
        for name in group.exits:
            shard = split.shards.get(f"{name}.weight")
            module = block.get_submodule(name)
            if shard is not None and is_linear(module) and shard.dim == (0 if is_transposed(module) else 1):
                yield _channels(shard)


def channels_of(split: BlockSplit) -> Iterator[Channels]:
    """Yields the channels of each parameter that is spread, equal ones once."""
    kinds = {(shard.size, shard.parts): shard for shard in split.shards.values() if not shard.is_replicated}
    yield from map(_channels, kinds.values())


def _channels(shard: Shard) -> Channels:
    return shard.size, [_indices(runs) for runs in shard.parts]


def _indices(runs: Runs) -> list[int]:
    return [index for first, end in runs for index in range(first, end)]
