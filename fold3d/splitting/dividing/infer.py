"""infer(): how a block is spread over a tensor-parallel group, found out by running it."""

from __future__ import annotations

from fold3d.sharding.split import Attribute, BlockSplit
from fold3d.splitting.dividing.alignment import align
from fold3d.splitting.dividing.attributes import Numbers
from fold3d.splitting.dividing.draft import Draft, module_of
from fold3d.splitting.dividing.regions import Reach, find_regions
from fold3d.splitting.probing.capture import CapturedCall
from fold3d.splitting.probing.probe import Poison, Probe
from fold3d.splitting.probing.reach import Respond, atoms

UNEQUAL = "a rank's part computes something else, whatever attribute is divided"


def infer(call: CapturedCall, tp: int, whole: frozenset[str] = frozenset()) -> BlockSplit:
    """Returns how a block may be divided among `tp` ranks.

    Every matrix product with a parameter is replaced by random numbers. NaN in one output channel shows which input
    channels of other products it reaches; channels that reach the same belong to one unit (a head, a group of heads
    with their keys, a neuron). Products whose outputs reach nothing but other products' inputs are divided with these,
    unit by unit, if ranks get equal numbers of equal units. What is divided is then run as each rank, and what it
    computes is compared with the whole by value.

    Args:
        whole: linear modules, or parameters, that are not to be divided.
    Raises: TraceError when the block cannot be run by itself.
    """
    probe = Probe(call)
    held_whole = {name for name, site in probe.sites.items() if module_of(probe, site) in whole} | probe.in_two_ways
    reach = {name: atoms(_of_site(probe, name), site.outputs) for name, site in probe.sites.items()}
    regions, failures = find_regions(probe.sites, reach, tp)
    numbers = Numbers(probe, tp)
    undone: set[str] = set()
    drafts: list[Draft] = []
    attributes: tuple[Attribute, ...] = ()
    split = BlockSplit()
    for region in regions:
        if not held_whole.isdisjoint((*region.columns, *region.rows)):
            failures.update(dict.fromkeys(region.rows, "a module of its region is to be whole"))
            continue
        draft = Draft(region, align(probe, region, tp))
        found = numbers.find([*drafts, draft], attributes)
        if found is None:
            undone |= region.rows.keys()
            failures.update(dict.fromkeys(region.rows, region.instead or UNEQUAL))
            continue
        drafts.append(draft)
        attributes, split = found.attributes, found
    reasons = dict(split.reasons)
    for name, site in probe.sites.items():
        why = "whole: it is multiplied in two ways" if name in probe.in_two_ways else ""
        reasons.setdefault(module_of(probe, site), why or _why_whole(name, probe, reach, failures, undone))
    return BlockSplit(
        groups=split.groups,
        shards=split.shards,
        attributes=split.attributes,
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
