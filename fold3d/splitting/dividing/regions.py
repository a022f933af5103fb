"""Regions of a block: which matrix products are divided together, and which channels each rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fold3d.sharding.shard import Runs, runs_of
from fold3d.splitting.dividing.units import Mixed, Units, find_units
from fold3d.splitting.probing.reach import Atom
from fold3d.splitting.probing.sites import Site

Reach = Mapping[str, list[Atom]]
"""Site -> its output channels, by what they reach."""

_MOST_PIECES = 9
_MOST_LEFT_OUT = 2


@dataclass(slots=True)
class Region:
    """A region as found: sites by the name of their parameter, channels per rank."""

    units: Units
    per_rank: int
    columns: dict[str, list[list[int]]] = field(default_factory=dict)
    rows: dict[str, list[list[int]]] = field(default_factory=dict)
    copied: dict[str, Runs] = field(default_factory=dict)
    common: dict[str, int] = field(default_factory=dict)
    """Site of `columns` -> how many of its channels several ranks hold."""
    instead: str = ""
    """Why nothing simpler was possible, where ranks hold some of the same."""

    @property
    def sites(self) -> set[str]:
        """The products that it divides."""
        return {*self.columns, *self.rows}


def find_regions(sites: Mapping[str, Site], reach: Reach, group: int) -> tuple[list[Region], dict[str, str]]:
    """Returns the regions of a block, and of other sites that something inside the block reaches why they are none.

    A product belongs to one region. Where several could have it, as in chains of layers with nothing between them, the
    region with the largest weights does.
    """
    found: list[Region] = []
    reasons: dict[str, str] = {}
    for sink in sites:
        if any(sink in atom.sinks for atoms in reach.values() for atom in atoms):
            region, reasons[sink] = _region_of(sink, sites, reach, group)
            found += [region] if region is not None else []
    regions: list[Region] = []
    taken: set[str] = set()
    for region in sorted(found, key=lambda region: -_weight(region, sites)):
        if taken.isdisjoint(region.sites):
            regions.append(region)
            taken |= region.sites
    for sink in reasons.keys() - taken:
        reasons[sink] = reasons[sink] or "it is divided otherwise, together with other layers"
    order = list(sites)
    regions.sort(key=lambda region: min(order.index(name) for name in region.sites))
    return regions, {sink: reason for sink, reason in reasons.items() if reason}


def _weight(region: Region, sites: Mapping[str, Site]) -> int:
    return sum(sites[name].inputs * sites[name].outputs for name in region.sites)


def _region_of(sink: str, sites: Mapping[str, Site], reach: Reach, group: int) -> tuple[Region | None, str]:
    reason = ""
    for rows in _rows_of(sink, reach):
        for attempt in _attempts(rows, reach):
            try:
                units = find_units({row: sites[row].inputs for row in rows}, attempt.sources, attempt.left_out)
            except Mixed as error:
                reason = reason or str(error)
                continue
            if units.count < group or units.count % group:
                if not reason or reason == _ONE_UNIT:
                    reason = _too_few(units.count, group)
                continue
            return _divide(units, attempt, reach, group, reason), ""
    return None, reason or "what feeds it is also needed elsewhere"


_ONE_UNIT = "every input channel depends on all that feeds it"


def _too_few(units: int, group: int) -> str:
    if units == 1:
        return _ONE_UNIT
    return f"{units} units {'are fewer than' if units < group else 'do not divide by'} tp={group}"


def _rows_of(sink: str, reach: Reach) -> Iterator[tuple[str, ...]]:
    """Yields which sites' inputs may be divided with that of `sink`: all that its sources feed, then it alone."""
    rows = {sink: None}
    while True:
        sources = [a for a, found in reach.items() if any(not rows.keys().isdisjoint(atom.sinks) for atom in found)]
        more = {row: None for a in sources for atom in reach[a] for row in atom.sinks}
        if more.keys() <= rows.keys():
            break
        rows |= more
    if len(rows) > 1:
        yield tuple(rows)
    yield (sink,)


@dataclass(slots=True)
class _Attempt:
    """One way to divide what feeds some rows."""

    sources: dict[str, list[Atom]]
    left_out: dict[str, frozenset[int]]
    copied: list[str]
    rows: tuple[str, ...]


def _attempts(rows: tuple[str, ...], reach: Reach) -> Iterator[_Attempt]:
    """Yields ways to divide what feeds `rows`: first all of it, then without what is cheapest to have on every rank."""
    feeding = {a: found for a, found in reach.items() if any(row in atom.sinks for atom in found for row in rows)}
    copied = [
        a for a, found in feeding.items() if any(atom.leaks or not atom.sinks.keys() <= set(rows) for atom in found)
    ]
    sources = {a: found for a, found in feeding.items() if a not in copied}
    if not sources or not sources.keys().isdisjoint(rows):
        return
    pieces = [piece for a, found in sources.items() for piece in _pieces(a, found, rows)]
    for number in range(_MOST_LEFT_OUT + 1):
        choices = itertools.combinations(pieces, number)
        for choice in sorted(choices, key=lambda chosen: sum(piece.channels for piece in chosen)):
            left_out: dict[str, frozenset[int]] = {}
            for piece in choice:
                left_out[piece.site] = left_out.get(piece.site, frozenset()) | piece.atoms
            if any(len(left_out.get(a, ())) < len(found) for a, found in sources.items()):
                yield _Attempt(sources, left_out, copied, rows)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of a site's atoms each of which reaches as many channels, such as the keys of a fused projection."""

    site: str
    atoms: frozenset[int]
    channels: int


def _pieces(site: str, found: list[Atom], rows: tuple[str, ...]) -> list[_Piece]:
    """Pieces that lie together, if there are few, and pieces that lie apart, such as the keys of groups of heads."""

    fan_out = [sum(atom.sinks[row].numel() for row in rows if row in atom.sinks) for atom in found]
    numbers = range(len(found))
    together = [list(group) for _, group in itertools.groupby(numbers, key=fan_out.__getitem__)]
    alike: dict[int, list[int]] = {}
    for number in numbers:
        alike.setdefault(fan_out[number], []).append(number)
    apart = list(alike.values())
    if len(together) > _MOST_PIECES:
        together = []
    if len(apart) > _MOST_PIECES:
        apart = []
    chosen = dict.fromkeys(frozenset(group) for group in (*together, *apart, numbers))
    return [_Piece(site, group, sum(found[k].end - found[k].first for k in group)) for group in chosen]


def _divide(units: Units, attempt: _Attempt, reach: Reach, group: int, instead: str) -> Region:
    per_rank = units.count // group
    region = Region(units, per_rank, instead=instead)
    ranks = {row: unit // per_rank for row, unit in units.rows.items()}
    for row in attempt.rows:
        region.rows[row] = [(ranks[row] == rank).nonzero().flatten().tolist() for rank in range(group)]
    for name, found in attempt.sources.items():
        parts: list[list[int]] = [[] for _ in range(group)]
        common = 0
        for number, atom in enumerate(found):
            channels = range(atom.first, atom.end)
            if number in attempt.left_out.get(name, ()):
                common += len(channels)
                readers = sorted({r for row, at in atom.sinks.items() if row in ranks for r in ranks[row][at].tolist()})
            else:
                readers = [units.columns[name][number] // per_rank]
            for rank in readers:
                parts[rank] += channels
        region.columns[name] = parts
        if common:
            region.common[name] = common
    for name in attempt.copied:
        read = [atom for atom in reach[name] if not atom.sinks.keys().isdisjoint(attempt.rows)]
        region.copied[name] = runs_of(channel for atom in read for channel in range(atom.first, atom.end))
    return region
