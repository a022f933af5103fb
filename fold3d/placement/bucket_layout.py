"""Which parameter of a rank lies in which bucket, and what has to wait for it. Names and numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Parameter

from fold3d.placement.buckets import cut_buckets
from fold3d.placement.layers import chunk_layers
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.placement.reading_modules import ReadingModules
from fold3d.topology import Submesh, chunks_of
from fold3d.trace import Trace

_FP32_BYTES = 4


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
    """Shared: the places of a replica with a copy of the bucket's only parameter (tied weights)."""
    planned: int
    """Number of the planner's bucket that it is part of, in the stage. The planner knows neither dtypes nor ties."""


def bucket_layout(
    parameters: Mapping[str, Parameter],
    placement: ParameterPlacement,
    trace: Trace | None,
    ranges: Sequence[tuple[int, int]],
    stage: int,
    least_bytes: int,
) -> list[BucketSpec]:
    """Returns the buckets of one rank in the order of the forward pass, the same on all replicas of the stage.

    Args:
        parameters: trainable ones with storage on this rank, by canonical name.
        ranges: [first, end) block of every chunk of the whole model.
        least_bytes: layers of a chunk join until a bucket's gradients have as many, in fp32.
    """
    reading = ReadingModules(trace)
    layers_of = chunk_layers(trace, ranges, placement.pp) if trace is not None else None
    specs: list[BucketSpec] = []
    planned = 0
    for chunk in chunks_of(stage, len(ranges), placement.pp):
        if layers_of is not None:
            layers = [layer.parameters for layer in layers_of[chunk]]
        else:  # of a model that is not cut nothing is known but the order in which it names its parameters
            layers = [(name,) for name in parameters]
        mine = [[name for name in layer if name in parameters and parameters[name].numel()] for layer in layers]
        sizes = [sum(_FP32_BYTES * parameters[name].numel() for name in layer) for layer in mine]
        for lo, hi in cut_buckets(sizes, least_bytes):
            names = [name for layer in mine[lo:hi] for name in layer]
            for part in _parts(names, parameters, placement):
                specs.append(_spec(chunk, part, planned, placement, stage, reading))
            planned += 1
    return specs


def _parts(names: list[str], parameters: Mapping[str, Parameter], placement: ParameterPlacement) -> list[list[str]]:
    """Returns each tied parameter alone, so that it lies alike wherever there is a copy, then the others by dtype."""
    tied = [name for name in names if placement.summed_over(name).is_shared]
    others: dict[str, list[str]] = {}
    for name in names:
        if name not in tied:
            others.setdefault(str(parameters[name].dtype), []).append(name)
    return [*([name] for name in tied), *others.values()]


def _spec(
    chunk: int, names: list[str], planned: int, placement: ParameterPlacement, stage: int, reading: ReadingModules
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
        summed_over=placement.summed_over(names[0]),
        planned=planned,
    )
