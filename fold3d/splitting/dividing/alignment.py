"""Which parameters and arguments, besides those of matrix products, a region divides, and which it reads whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fold3d.sharding.shard import Runs, Shard, runs_of
from fold3d.sharding.split import Path, TensorSlice
from fold3d.splitting.dividing.regions import Region
from fold3d.splitting.probing.probe import Poison, Probe, Response
from fold3d.splitting.probing.reach import Atom, atoms
from fold3d.tensor_parallel.slices import paths_of


@dataclass(slots=True)
class Alignment:
    """What a region has of a block's other tensors."""

    sliced: dict[str, Shard] = field(default_factory=dict)
    """Parameters of which each rank's units read a part."""
    partial: list[str] = field(default_factory=list)
    """Parameters that all units read: each rank has a part of their gradient."""
    inputs: list[TensorSlice] = field(default_factory=list)
    entering: list[Path] = field(default_factory=list)


def align(probe: Probe, region: Region, tp: int) -> Alignment:
    """Finds out by NaN along each dimension of each of them; the tensors that reach no input of the region's rows are
    not its matter."""
    found = Alignment()
    for name in probe.free:
        shape = probe.shape_of(name)
        if not _reaches(probe.respond(Poison(range(shape[0] if shape else 1), parameter=name)), region):
            continue
        for dim, size in enumerate(shape):
            labels = _labels(atoms(_of_parameter(probe, name, dim), size), size, region)
            if labels is not None:
                found.sliced[name] = Shard(dim, size, _parts(labels, region, tp))
                break
        else:
            found.partial.append(name)
    for path, tensor in paths_of((probe.args, probe.kwargs)):
        if not tensor.is_floating_point():
            continue
        where = path[1:]
        everything = range(tensor.shape[0] if tensor.dim() else 1)
        if not _reaches(probe.respond(Poison(everything, argument=where)), region):
            continue
        for dim, size in enumerate(tensor.shape):
            labels = _labels(atoms(_of_argument(probe, where, dim), size), size, region)
            if labels is None:
                continue
            period = period_of(labels)
            parts = _parts(labels[:period], region, tp)
            found.inputs.append(TensorSlice(path=where, dim=dim, period=period, parts=parts))
            break
        else:
            found.entering.append(where)
    return found


def period_of(labels: Sequence[int]) -> int:
    """Returns the shortest length after which labels repeat themselves up to the end."""
    size = len(labels)
    lengths = (length for length in range(1, size + 1) if size % length == 0)
    return next(length for length in lengths if all(labels[k] == labels[k - length] for k in range(length, size)))


def _of_parameter(probe: Probe, name: str, dim: int):  # type: ignore[no-untyped-def]
    return lambda indices: probe.respond(Poison(indices, parameter=name, dim=dim))


def _of_argument(probe: Probe, path: Path, dim: int):  # type: ignore[no-untyped-def]
    return lambda indices: probe.respond(Poison(indices, argument=path, dim=dim))


def _reaches(response: Response, region: Region) -> bool:
    return not response.sinks.keys().isdisjoint(region.rows)


def _labels(found: Iterable[Atom], size: int, region: Region) -> list[int] | None:
    """Returns of each index which unit reads it; None unless each is read by one and each reads some."""
    labels = [-1] * size
    for atom in found:
        units: set[int] = set()
        for row, of_channels in region.units.rows.items():
            channels: Tensor = atom.sinks.get(row, torch.empty(0, dtype=torch.long))
            units |= set(of_channels[channels].tolist())
        if len(units) != 1 or not atom.sinks.keys() <= region.rows.keys():
            return None
        labels[atom.first : atom.end] = [units.pop()] * (atom.end - atom.first)
    return labels if set(labels) == set(range(region.units.count)) else None


def _parts(labels: Sequence[int], region: Region, tp: int) -> tuple[Runs, ...]:
    return tuple(runs_of(k for k, unit in enumerate(labels) if unit // region.per_rank == rank) for rank in range(tp))
