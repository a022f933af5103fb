"""Which parameter of a rank lies in which bucket, and which modules have to wait for it. Names and numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Parameter

from fold3d.placement.buckets import cut_buckets
from fold3d.placement.layers import chunk_layers
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.topology import Submesh, chunks_of
from fold3d.trace import Trace


class ReadingModules:
    """Which modules read a parameter, as far as the recording proves it."""

    def __init__(self, trace: Trace | None):
        self._trace = trace
        self._blocks: dict[str, set[int]] = {}
        for k, name in enumerate(trace.blocks if trace else ()):
            self._blocks.setdefault(name, set()).add(k)
        self._outer = {*trace.prologue, *trace.epilogue} if trace else set()
        self._aliases = {name: group for group in trace.tied for name in group} if trace else {}

    def of(self, name: str) -> tuple[str, ...]:
        """Returns the modules whose forwards alone read parameter `name`; none when others may."""
        trace = self._trace
        aliases = self._aliases.get(name, (name,))
        if trace is None or not set(aliases).isdisjoint((*trace.shared, *trace.direct)):
            return ()
        inside = [self._enclosing(alias) for alias in aliases]
        regions = {k for k, used in enumerate(trace.uses) if not set(aliases).isdisjoint(used)}
        allowed: set[int] = set()
        for module in inside:
            if module is None:
                return ()
            allowed |= self._blocks.get(module, {0, len(trace.blocks)})
        return tuple(dict.fromkeys(module for module in inside if module)) if regions <= allowed else ()

    def _enclosing(self, name: str) -> str | None:
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        return next((prefix for prefix in prefixes if prefix in self._blocks or prefix in self._outer), None)


FP32_BYTES = 4
"""Of a number of a gradient bucket, whatever the parameter's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSpec:
    """Parameters that are summed together, all of one dtype."""

    chunk: int
    """Its last backward completes the gradients on this rank."""
    names: tuple[str, ...]
    """Canonical parameter names in the order of the layout."""
    modules: tuple[str, ...]
    """Modules whose forward must wait until the parameters are up to date."""
    chunks: tuple[int, ...]
    """Chunks of this rank whose whole forward must wait, where no module is known that alone reads them."""
    summed_over: Submesh
    """Shared: the places of a replica over which the gradients of all its parameters are summed. A parameter that
    several stages have (tied weights) is then the only one."""
    planned: int
    """Number of the planner's bucket that it is part of, in the stage. The planner knows neither dtypes nor ties."""


def bucket_layout(
    parameters: Mapping[str, Parameter],
    placement: ParameterPlacement,
    trace: Trace | None,
    ranges: Sequence[tuple[int, int]],
    stage: int,
    least_bytes: int,
    tp_rank: int = 0,
) -> list[BucketSpec]:
    """Returns the buckets of one rank in the order of the forward pass, the same on all replicas of the stage.

    On all ranks of a tensor-parallel group layers are joined alike, whatever their parts of the weights are: by the
    largest.

    Args:
        parameters: trainable ones with storage on this rank, by canonical name, as this rank holds them.
        ranges: [first, end) block of every chunk of the whole model.
        least_bytes: layers of a chunk join until a bucket's gradients have as many, in fp32.
    """
    reading = ReadingModules(trace)
    layers_of = chunk_layers(trace, ranges, placement.pp, placement.style) if trace is not None else None
    specs: list[BucketSpec] = []
    planned = 0
    for chunk in chunks_of(stage, len(ranges), placement.pp, placement.style):
        if layers_of is not None:
            layers = [layer.parameters for layer in layers_of[chunk]]
        else:  # of a model that is not cut nothing is known but the order in which it names its parameters
            layers = [(name,) for name in parameters]
        mine = [[name for name in layer if name in parameters] for layer in layers]
        sizes = [sum(_most_bytes(name, parameters[name], placement) for name in layer) for layer in mine]
        for lo, hi in cut_buckets(sizes, least_bytes):
            names = [name for layer in mine[lo:hi] for name in layer if parameters[name].numel()]
            for places, part in _parts(names, parameters, placement, tp_rank):
                specs.append(_spec(chunk, part, planned, places, placement, stage, reading))
            planned += 1
    return specs


def _most_bytes(name: str, parameter: Parameter, placement: ParameterPlacement) -> int:
    """Returns the bytes of the gradient on the rank of a tensor-parallel group that holds most of the parameter."""
    shard = placement.sharding.shard_of(name)
    if shard is None:
        return FP32_BYTES * parameter.numel()
    return max(FP32_BYTES * math.prod(shard.shape(parameter.shape, rank)) for rank in range(shard.ranks))


def _parts(
    names: list[str], parameters: Mapping[str, Parameter], placement: ParameterPlacement, tp_rank: int
) -> list[tuple[Submesh, list[str]]]:
    """Returns each tied parameter alone, so that it lies alike wherever there is a copy, then the others by dtype,
    those apart that are summed over ranks of a tensor-parallel group, which have the same layers."""
    tied: list[tuple[Submesh, list[str]]] = []
    others: dict[tuple[str, Submesh], list[str]] = {}
    for name in names:
        places = placement.summed_over(name, tp_rank)
        if len(places.pp) > 1:
            tied.append((places, [name]))
        else:
            others.setdefault((str(parameters[name].dtype), places), []).append(name)
    return [*tied, *((places, part) for (_, places), part in others.items())]


def _spec(
    chunk: int,
    names: list[str],
    planned: int,
    places: Submesh,
    placement: ParameterPlacement,
    stage: int,
    reading: ReadingModules,
) -> BucketSpec:
    modules: dict[str, None] = {}
    waiting: set[int] = set()
    for name in names:
        found = reading.of(name)
        modules.update(dict.fromkeys(found))
        if not found:
            waiting.update(placement.readers_on(name, stage))
    return BucketSpec(
        chunk=chunk,
        names=tuple(names),
        modules=tuple(modules),
        chunks=tuple(sorted(waiting)),
        summed_over=places,
        planned=planned,
    )
