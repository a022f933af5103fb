"""Draft: regions of a block, put into the terms of a BlockSplit; which of its parameters and arguments they divide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fold3d.sharding.shard import Runs, Shard, runs_of
from fold3d.sharding.split import Attribute, BlockSplit, GroupSplit, Path, TensorSlice
from fold3d.splitting.probe import Atom, Poison, Probe, Response, atoms
from fold3d.splitting.regions import Region
from fold3d.splitting.sites import Site
from fold3d.tensor_parallel.linear import is_linear
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
            found.inputs.append(TensorSlice(path=where, dim=dim, size=period, parts=parts))
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


@dataclass(frozen=True, slots=True)
class Draft:
    """One region with what it has of other tensors."""

    region: Region
    alignment: Alignment


def module_of(probe: Probe, site: Site) -> str:
    """Returns what a table calls a site: a linear module, or the parameter itself."""
    return site.holder if is_linear(probe.block.get_submodule(site.holder)) else site.weight


def split_of(
    probe: Probe, drafts: Sequence[Draft], tp: int, attributes: tuple[Attribute, ...], outputs: tuple[TensorSlice, ...]
) -> BlockSplit:
    """Returns the BlockSplit that divides these regions."""
    shards: dict[str, Shard] = {}
    groups = [_group(probe, draft, tp, shards) for draft in drafts]
    entering = dict.fromkeys(path for draft in drafts for path in draft.alignment.entering)
    inputs = {(one.path, one.dim): one for draft in drafts for one in draft.alignment.inputs}
    return BlockSplit(
        groups=tuple(groups),
        shards=shards,
        attributes=attributes,
        inputs=tuple(inputs.values()),
        entering=tuple(path for path in entering if all(path != one.path for one in inputs.values())),
        outputs=outputs,
        reasons=_reasons(probe, drafts),
    )


def _group(probe: Probe, draft: Draft, tp: int, shards: dict[str, Shard]) -> GroupSplit:
    region = draft.region
    sites: Mapping[str, Site] = probe.sites
    for name, parts in region.columns.items():
        site = sites[name]
        made = tuple(runs_of(channels) for channels in parts)
        held = Shard(site.out_dim, site.outputs, made)
        # Ranks with equal parts have different shares of their gradient, which is summed when it is complete; where
        # parts overlap otherwise, what several hold is summed in each backward.
        summed = name in region.common and not held.overlaps
        shards[name] = Shard(site.out_dim, site.outputs, made, summed)
        if site.bias is not None:
            shape = probe.shape_of(site.bias)
            shards[site.bias] = Shard(len(shape) - 1, site.outputs, made, summed)
    shared: list[str] = []
    for name, parts in region.rows.items():
        site = sites[name]
        shards[name] = Shard(site.in_dim, site.inputs, tuple(runs_of(channels) for channels in parts))
        shared += _added_by(probe, site, draft)
    shards.update(draft.alignment.sliced)
    for name in (*draft.alignment.partial, *shared, *_inside(probe, draft)):
        shards[name] = Shard.replicated(probe.shape_of(name), tp, summed=True)
    return GroupSplit(
        units=region.units.count,
        entries=tuple(dict.fromkeys(sites[name].holder for name in region.columns)),
        exits=tuple(dict.fromkeys(sites[name].holder for name in region.rows)),
        copied={sites[name].holder: runs for name, runs in region.copied.items()},
        shared=tuple(shared),
    )


def _added_by(probe: Probe, site: Site, draft: Draft) -> list[str]:
    """Parameters that a module which is no plain linear layer adds behind the product: they reach what it returns, but
    no product inside it."""
    if is_linear(probe.block.get_submodule(site.holder)):
        return []
    prefix = f"{site.holder}." if site.holder else ""
    inside = set(_inside(probe, draft)) | set(draft.alignment.partial) | draft.alignment.sliced.keys()
    added = [name for name in probe.free if name.startswith(prefix) and name not in inside]
    return [*added, *([site.bias] if site.bias is not None else [])]


def _inside(probe: Probe, draft: Draft) -> list[str]:
    """Parameters in front of the products of a module that is a region as a whole, such as a norm of its own."""
    found = []
    for name in draft.region.columns:
        holder = probe.sites[name].holder
        if is_linear(probe.block.get_submodule(holder)):
            continue
        prefix = f"{holder}." if holder else ""
        known = draft.alignment.sliced.keys() | set(draft.alignment.partial)
        for free in probe.free:
            if free.startswith(prefix) and free not in known and name in probe.reached_by(free):
                found.append(free)
    return list(dict.fromkeys(found))


def _reasons(probe: Probe, drafts: Sequence[Draft]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for draft in drafts:
        region = draft.region
        exits = ", ".join(module_of(probe, probe.sites[row]) for row in region.rows)
        for name in region.columns:
            common = region.common.get(name, 0)
            text = f"{region.units.count} units, summed in {exits}"
            if common:
                text += f"; {common} channels are held where they are read"
            reasons[module_of(probe, probe.sites[name])] = text
        for name in region.rows:
            reasons[module_of(probe, probe.sites[name])] = f"takes {region.units.count} units, its result is summed"
        for name in region.copied:
            reasons[module_of(probe, probe.sites[name])] = f"whole, because more than {exits} reads it"
        for name in draft.alignment.sliced:
            reasons[name] = f"each of {region.units.count} units has its own"
        for name in draft.alignment.partial:
            reasons[name] = "whole, because all units read it; its gradient is summed"
    return reasons
