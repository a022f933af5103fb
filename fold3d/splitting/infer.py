"""infer(): how a block is spread over a tensor-parallel group, found out by running it; Draft: regions of the block,
put into the terms of a BlockSplit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fold3d.sharding.shard import Runs, Shard, runs_of
from fold3d.sharding.split import Attribute, BlockSplit, GroupSplit, Path, TensorSlice
from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.probe import Atom, Local, Poison, Probe, Respond, Response, atoms
from fold3d.splitting.regions import Reach, Region, find_regions
from fold3d.splitting.sites import Site
from fold3d.tensor_parallel.install import set_attribute, set_attributes
from fold3d.tensor_parallel.linear import is_linear
from fold3d.tensor_parallel.slices import paths_of, replace_argument, take_part
from fold3d.tensor_parallel.whole_sizes import WholeSizes
from fold3d.trace.coat import Coat


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
    probe: Probe, drafts: Sequence[Draft], tp: int, numbers: Divided, outputs: tuple[TensorSlice, ...]
) -> BlockSplit:
    """Returns the BlockSplit that divides these regions."""
    shards: dict[str, Shard] = {}
    groups = [_group(probe, draft, tp, shards) for draft in drafts]
    entering = dict.fromkeys(path for draft in drafts for path in draft.alignment.entering)
    inputs = {(one.path, one.dim): one for draft in drafts for one in draft.alignment.inputs}
    return BlockSplit(
        groups=tuple(groups),
        shards=shards,
        attributes=numbers.attributes,
        whole_sizes=numbers.whole_sizes,
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


@dataclass(frozen=True, slots=True)
class Divided:
    """What a rank's code finds otherwise than the whole's."""

    attributes: tuple[Attribute, ...] = ()
    whole_sizes: bool = False
    """Views are asked for by sizes of the whole."""


_MOST = 4
_MOST_SETS = 400
"""Of numbers that are tried for a block: with 15 integers in it there are 4,000 for each region, and a run for each."""
_CLOSE = 1e-9
"""Of what a rank computes to the whole run's part of it, in double precision."""


class Numbers:
    """Searches the smallest set of integers to divide such that a rank computes its slices of what the whole computes.

    Shapes alone mislead: many sets fit them. So the inputs of all matrix products are compared by value.
    """

    def __init__(self, probe: Probe, tp: int) -> None:
        self._probe = probe
        self._tp = tp
        self._whole = {name: list(found) for name, found in probe.run().items()}
        self._output = probe.output
        found = self._integers()
        read = {(one.module, one.name) for one in found if self._matters(one)}
        self._candidates = [one for one in found if (one.module, one.name) in read]
        self._sets_left = _MOST_SETS

    def find(self, drafts: Sequence[Draft], known: Divided) -> BlockSplit | None:
        """Returns the split of these regions, with the numbers that it needs, or None if none are right.

        Args:
            known: what the regions before the last one need.
        """
        for chosen in self._choices(known):
            if self._sets_left == 0:
                break
            self._sets_left -= 1
            split = split_of(self._probe, drafts, self._tp, chosen, ())
            outputs = self._slices(drafts, split)
            if outputs is not None:
                return split_of(self._probe, drafts, self._tp, chosen, outputs)
        return None

    def _choices(self, known: Divided) -> Iterator[Divided]:
        held = {(one.module, one.name) for one in known.attributes}
        others = [one for one in self._candidates if (one.module, one.name) not in held]
        for whole_sizes in (True,) if known.whole_sizes else (False, True):
            for number in range(_MOST + 1):
                for more in itertools.combinations(others, number):
                    if len({(one.module, one.name) for one in more}) == number:
                        yield Divided((*known.attributes, *more), whole_sizes)

    # -- candidates --

    def _integers(self) -> list[Attribute]:
        factors = [factor for factor in range(self._tp, 1, -1) if self._divides(self._tp, factor)]
        own: list[Attribute] = []
        of_config: list[Attribute] = []
        for name, module in self._probe.block.named_modules():
            if is_linear(module):
                continue
            config = vars(module).get("config")
            places = (("", own, vars(module)), ("config.", of_config, getattr(config, "__dict__", {})))
            for prefix, found, values in places:
                for key, value in values.items():
                    if type(value) is int and value > 1:
                        found += [
                            Attribute(module=name, name=prefix + key, whole=value, part=value // factor)
                            for factor in factors
                            if self._divides(value, factor)
                        ]
        return own + of_config

    @staticmethod
    def _divides(value: int, factor: int) -> bool:
        return divmod(value, factor)[1] == 0

    def _matters(self, attribute: Attribute) -> bool:
        """Returns whether the block computes something else with another value: if not, nothing reads it."""
        try:
            with Coat() as coat:
                set_attribute(coat, self._probe.block, attribute)
                found = self._probe.run_otherwise()
        except Exception:
            return True
        return not _equal(found, self._whole) or not close(_leaves(self._probe.output), _leaves(self._output))

    # -- comparison --

    def _slices(self, drafts: Sequence[Draft], split: BlockSplit) -> tuple[TensorSlice, ...] | None:
        """Returns which results are parts on a rank, or None if a rank does not compute what it should."""
        results: list[Any] = []
        for rank in range(self._tp):
            try:
                with Coat() as coat, WholeSizes(self._tp) if split.whole_sizes else nullcontext():
                    set_attributes(coat, self._probe.block, split, rank)
                    seen = self._run(drafts, split, rank)
            except Exception:
                return None
            if not _equal(seen, self._expected(drafts, rank)):
                return None
            results.append(self._probe.output)
        return self._outputs(results)

    def _run(self, drafts: Sequence[Draft], split: BlockSplit, rank: int) -> dict[str, list[Tensor]]:
        probe = self._probe
        outputs = {name: torch.tensor(parts[rank]) for draft in drafts for name, parts in draft.region.columns.items()}
        args, kwargs = probe.args, probe.kwargs
        for one in split.inputs:
            args, kwargs = replace_argument(args, kwargs, one.path, partial(take_part, sliced=one, rank=rank))
        return probe.run_otherwise(args, kwargs, Local(outputs, dict(split.shards), rank))

    def _expected(self, drafts: Sequence[Draft], rank: int) -> dict[str, list[Tensor]]:
        rows = {name: torch.tensor(parts[rank]) for draft in drafts for name, parts in draft.region.rows.items()}
        return {
            name: [x.index_select(-1, rows[name]) for x in found] if name in rows else found
            for name, found in self._whole.items()
        }

    def _outputs(self, results: list[Any]) -> tuple[TensorSlice, ...] | None:
        found: list[TensorSlice] = []
        for path, whole in paths_of(self._output):
            if path not in self._probe.read:
                continue
            parts = [part for result in results for place, part in paths_of(result) if place == path]
            if len(parts) != self._tp:
                return None
            if all(_near(part, whole) for part in parts):
                continue
            sliced = _find_slice(path, whole, parts)
            if sliced is None:
                return None
            found.append(sliced)
        return tuple(found)


def _find_slice(path: tuple[int | str, ...], whole: Tensor, parts: list[Tensor]) -> TensorSlice | None:
    """Returns of which indices of one dimension of `whole` the ranks' tensors are made."""
    if any(part.dim() != whole.dim() for part in parts):
        return None
    dims = [dim for dim, size in enumerate(whole.shape) if any(part.shape[dim] < size for part in parts)]
    if len(dims) != 1:
        return None
    dim, size = dims[0], whole.shape[dims[0]]
    even = torch.cat(parts, dim)
    if even.shape == whole.shape and close([even], [whole]):
        lengths = [part.shape[dim] for part in parts]
        ends = list(itertools.accumulate(lengths))
        runs = tuple(((end - length, end),) for end, length in zip(ends, lengths, strict=True))
        return TensorSlice(path=path, dim=dim, size=size, parts=runs)
    labels = [-1] * size
    per_rank: list[list[int]] = []
    for rank, part in enumerate(parts):
        chosen: list[int] = []
        for piece in part.unbind(dim):
            start = chosen[-1] + 1 if chosen else 0
            match = next((k for k in range(start, size) if close([piece], [whole.select(dim, k)])), None)
            if match is None:
                return None
            chosen.append(match)
            labels[match] = rank
        per_rank.append(chosen)
    if -1 in labels:
        return None
    period = period_of(labels)
    made: tuple[Runs, ...] = tuple(runs_of(k for k in chosen if k < period) for chosen in per_rank)
    return TensorSlice(path=path, dim=dim, size=period, parts=made)


def _leaves(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in paths_of(output)]


def _equal(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> bool:
    return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in found)


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Returns whether tensors are equal but for rounding in double precision; NaN is equal to NaN."""
    return len(found) == len(expected) and all(map(_near, found, expected))


def _near(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    if x.shape != y.shape or not x.is_floating_point():
        return torch.equal(x, y)
    return torch.equal(x, y) or torch.allclose(x, y, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)


UNEQUAL = "a rank's part computes something else, whatever attribute is divided"


def infer(
    call: CapturedCall, tp: int, whole: frozenset[str] = frozenset(), known: dict[str, list[Atom]] | None = None
) -> BlockSplit:
    """Returns how a block may be divided among `tp` ranks.

    Every matrix product with a parameter is replaced by random numbers. NaN in one output channel shows which input
    channels of other products it reaches; channels that reach the same belong to one unit (a head, a group of heads
    with their keys, a neuron). Products whose outputs reach nothing but other products' inputs are divided with these,
    unit by unit, if ranks get equal numbers of equal units. What is divided is then run as each rank, and what it
    computes is compared with the whole by value.

    Args:
        whole: linear modules, or parameters, that are not to be divided.
        known: what channels of the block's products reach, which takes most of the time; filled where it is empty.
    Raises: TraceError when the block cannot be run by itself.
    """
    probe = Probe(call)
    held_whole = {name for name, site in probe.sites.items() if module_of(probe, site) in whole} | probe.in_two_ways
    reach = {} if known is None else known
    for name, site in probe.sites.items():
        if name not in reach:
            reach[name] = atoms(_of_site(probe, name), site.outputs)
    regions, failures = find_regions(probe.sites, reach, tp)
    numbers = Numbers(probe, tp)
    undone: set[str] = set()
    drafts: list[Draft] = []
    needed = Divided()
    split = BlockSplit()
    for region in regions:
        if not held_whole.isdisjoint((*region.columns, *region.rows)):
            failures.update(dict.fromkeys(region.rows, "a module of its region is to be whole"))
            continue
        draft = Draft(region, align(probe, region, tp))
        found = numbers.find([*drafts, draft], needed)
        if found is None:
            undone |= region.rows.keys()
            failures.update(dict.fromkeys(region.rows, region.instead or UNEQUAL))
            continue
        drafts.append(draft)
        needed, split = Divided(found.attributes, found.whole_sizes), found
    reasons = dict(split.reasons)
    for name, site in probe.sites.items():
        why = "whole: it is multiplied in two ways" if name in probe.in_two_ways else ""
        reasons.setdefault(module_of(probe, site), why or _why_whole(name, probe, reach, failures, undone))
    return BlockSplit(
        groups=split.groups,
        shards=split.shards,
        attributes=split.attributes,
        whole_sizes=split.whole_sizes,
        inputs=split.inputs,
        entering=split.entering,
        outputs=split.outputs,
        reasons=reasons,
    )


def _of_site(probe: Probe, name: str) -> Respond:
    return lambda indices: probe.respond(Poison(indices, site=name))


def _why_whole(name: str, probe: Probe, reach: Reach, failures: dict[str, str], undone: set[str]) -> str:
    if any(atom.leaks for atom in reach[name]):
        return f"whole: {failures[name]}" if name in undone else "whole: what it computes leaves the block"
    for row in (*(row for atom in reach[name] for row in atom.sinks), name):
        if row in failures:
            at = "" if row == name else f" (at {module_of(probe, probe.sites[row])})"
            return f"whole: {failures[row]}{at}"
    if any(atom.sinks for atom in reach[name]):
        return "whole: what reads its result is divided together with other layers"
    return "whole: nothing reads what it computes"
