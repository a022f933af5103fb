"""of_a_shard(): what layers cost where several ranks share their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fold3d.plan.costs import Profile
from fold3d.sharding.plan import ShardingPlan
from fold3d.trace import Trace


def of_a_shard(profile: Profile, trace: Trace, sharding: ShardingPlan, shapes: Mapping[str, Sequence[int]]) -> Profile:
    """Returns the costs on the rank of a tensor-parallel group that has most, without TP.sync.

    Bytes are those of its parts. A layer takes the share of its time that its weights there are of all its weights:
    matrix products are nearly all of the work, and each is divided as its matrix is.

    Args:
        profile: of the whole layers.
        shapes: of all parameters, whole, by canonical name.
    """
    part = {name: _largest_share(sharding, name, shape) for name, shape in shapes.items()}
    inside = f"{trace.blocks[0]}."
    first = [name for name in trace.uses[0] if name.startswith(inside)]
    before = [name for name in trace.uses[0] if not name.startswith(inside)]
    layers = [before, first, *trace.uses[1:]]
    canonical = trace.canonical()

    def share(layer: Sequence[str]) -> float:
        names = [canonical.get(name, name) for name in layer]
        whole = sum(math.prod(shapes[name]) for name in names)
        return sum(math.prod(shapes[name]) * part[name] for name in names) / whole if whole else 1.0

    shares = [share(layer) for layer in layers]
    return replace(
        profile,
        forward=tuple(time * factor for time, factor in zip(profile.forward, shares, strict=True)),
        backward=tuple(time * factor for time, factor in zip(profile.backward, shares, strict=True)),
        gradient_bytes={name: round(size * part[name]) for name, size in profile.gradient_bytes.items()},
        parameter_bytes={name: round(size * part[name]) for name, size in profile.parameter_bytes.items()},
    )


def _largest_share(sharding: ShardingPlan, name: str, shape: Sequence[int]) -> float:
    """Returns how much of a parameter the rank holds that has most of it, 1.0 for all."""
    shard = sharding.shard_of(name)
    if shard is None or not math.prod(shape):
        return 1.0
    return max(shard.length(rank) for rank in range(shard.ranks)) / shard.size
