"""of_a_shard(): what layers cost where several ranks share their weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from fold3d.plan.costs import Profile
from fold3d.plan.memory.layer_bytes import LayerBytes
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.sharding.plan import ShardingPlan
from fold3d.trace import Trace

_log = logging.getLogger(__name__)


def of_a_shard(
    profile: Profile,
    trace: Trace,
    sharding: ShardingPlan,
    shapes: Mapping[str, Sequence[int]],
    layers: tuple[LayerBytes, ...] = (),
) -> Profile:
    """Returns the costs on the rank of a tensor-parallel group that has most, without TP.sync.

    Bytes are those of its parts. A layer takes the share of its time that its weights there are of all its weights:
    matrix products are nearly all of the work, and each is divided as its matrix is.

    Args:
        profile: of the whole layers.
        shapes: of all parameters, whole, by canonical name.
        layers: what layers need in memory there; empty: nobody knows, so as much as whole ones.
    """
    part = {name: _largest_share(sharding, name, shape) for name, shape in shapes.items()}
    inside = f"{trace.blocks[0]}."
    first = [name for name in trace.uses[0] if name.startswith(inside)]
    before = [name for name in trace.uses[0] if not name.startswith(inside)]
    parameters = [before, first, *trace.uses[1:]]
    canonical = trace.canonical()

    def share(layer: Sequence[str]) -> float:
        names = [canonical.get(name, name) for name in layer]
        whole = sum(math.prod(shapes[name]) for name in names)
        return sum(math.prod(shapes[name]) * part[name] for name in names) / whole if whole else 1.0

    shares = [share(layer) for layer in parameters]
    return replace(
        profile,
        forward=tuple(time * factor for time, factor in zip(profile.forward, shares, strict=True)),
        backward=tuple(time * factor for time, factor in zip(profile.backward, shares, strict=True)),
        layers=layers or profile.layers,
        inside=tuple(
            replace(one, seconds=tuple(time * factor for time, factor in zip(one.seconds, shares, strict=True)))
            for one in profile.inside
        ),
        gradient_bytes={name: round(size * part[name]) for name, size in profile.gradient_bytes.items()},
        parameter_bytes={name: round(size * part[name]) for name, size in profile.parameter_bytes.items()},
    )


def _largest_share(sharding: ShardingPlan, name: str, shape: Sequence[int]) -> float:
    """Returns how much of a parameter the rank holds that has most of it, 1.0 for all."""
    shard = sharding.shard_of(name)
    if shard is None or not math.prod(shape):
        return 1.0
    return max(shard.length(rank) for rank in range(shard.ranks)) / shard.size


def layers_of_a_shard(
    model: Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    sharding: ShardingPlan,
    device: torch.device | str = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[Module], object] = lambda model: None,
) -> tuple[LayerBytes, ...]:
    """Returns what layers need in memory on a rank of a tensor-parallel group; nothing where that cannot be told.

    Args:
        model: its weights are whole, or on the meta device.
        micro_batch: keyword arguments of its forward.
    """
    try:
        return layer_bytes(model, trace, micro_batch, device, autocast=autocast, prepare=prepare, sharding=sharding)
    except Exception as error:  # whatever a model raises on tensors without values
        _log.info("activations count as if they were whole (%s: %s)", type(error).__name__, error)
        return ()
