"""Draft: regions of a block, put into the terms of a BlockSplit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fold3d.sharding.shard import Shard, runs_of
from fold3d.sharding.split import Attribute, BlockSplit, GroupSplit, TensorSlice
from fold3d.splitting.dividing.alignment import Alignment
from fold3d.splitting.dividing.regions import Region
from fold3d.splitting.probing.probe import Probe
from fold3d.splitting.probing.sites import Site
from fold3d.tensor_parallel.linear import is_linear


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
