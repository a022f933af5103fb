"""Regions of a block: which matrix products are divided together, and which channels each rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fold3d.sharding.shard import Runs, runs_of
from fold3d.splitting.probe import Atom
from fold3d.splitting.sites import Site


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a region, numbered by their first input channel."""

    count: int
    rows: Mapping[str, Tensor]
    """Site whose input is divided -> of each of its input channels, which unit it belongs to."""
    columns: Mapping[str, Sequence[int]]
    """Site -> of each of its atoms, which unit it belongs to; -1 for those left out."""


class Mixed(Exception):
    """The channels cannot be divided into equal units; the message says why."""


def find_units(
    rows: Mapping[str, int], columns: Mapping[str, list[Atom]], left_out: Mapping[str, frozenset[int]]
) -> Units:
    """Returns the units of a region: an atom and what it reaches belong to the same one.

    Args:
        rows: sites whose input channels are to be divided -> how many they have.
        columns: sites whose output channels are to be divided -> their atoms.
        left_out: of a site in `columns`, the atoms that every rank has, if a unit of its own reads them.
    Raises: Mixed when something is left without a unit, or units are not alike.
    """
    starts = dict(zip(rows, itertools.accumulate(rows.values(), initial=0), strict=False))
    channels = _Channels(sum(rows.values()))
    for name, found in columns.items():
        left = left_out.get(name, ())
        kept = [atom for number, atom in enumerate(found) if number not in left]
        if kept:
            channels.join(*_reached(kept, starts, name), name)
    for row, size in rows.items():
        uncovered = ~channels.covered[starts[row] : starts[row] + size]
        if uncovered.any():
            raise Mixed(f"input channel {int(uncovered.nonzero()[0])} of {row} comes from elsewhere")
    count, of_channels, of_atoms = channels.sets()
    of_rows = {row: of_channels[starts[row] : starts[row] + size] for row, size in rows.items()}
    of_columns: dict[str, list[int]] = {}
    amounts = [torch.bincount(units, minlength=count) for units in of_rows.values()]
    for name, found in columns.items():
        units = iter(of_atoms[name].tolist() if name in of_atoms else ())
        left = left_out.get(name, ())
        of_columns[name] = [-1 if n in left else next(units) for n in range(len(found))]
        widths = torch.tensor([atom.end - atom.first for atom in found])
        kept_units = torch.tensor(of_columns[name])
        amount = torch.zeros(count + 1, dtype=torch.long).index_add_(0, kept_units + 1, widths)
        amounts.append(amount[1:])
    if any(bool((amount != amount[0]).any()) for amount in amounts):
        raise Mixed(f"its {count} units are not alike")
    return Units(count, of_rows, of_columns)


def _reached(atoms: list[Atom], starts: Mapping[str, int], name: str) -> tuple[Tensor, Tensor]:
    """Returns the channels that atoms of site `name` reach, by the number at which those of each row start, and of each
    the atom that does. Raises: Mixed for an atom that reaches none of the rows."""
    channels, numbers = [], []
    for row, start in starts.items():
        reaching = [number for number, atom in enumerate(atoms) if row in atom.sinks]
        if reaching:
            reached = [atoms[number].sinks[row] for number in reaching]
            channels.append(torch.cat(reached) + start)
            numbers.append(torch.tensor(reaching).repeat_interleave(torch.tensor([one.numel() for one in reached])))
    all_numbers = torch.cat([torch.empty(0, dtype=torch.long), *numbers])
    unread = torch.bincount(all_numbers, minlength=len(atoms)) == 0
    if unread.any():
        raise Mixed(f"output channel {atoms[int(unread.nonzero()[0])].first} of {name} is not read")
    return torch.cat(channels), all_numbers


class _Channels:
    """Sets of channels, of all sites whose input is divided one behind the other: those that an atom reaches are in one
    set.

    Attributes:
        covered: [channels] whether any atom reaches one.
    """

    def __init__(self, size: int) -> None:
        self.covered = torch.zeros(size, dtype=torch.bool)
        self._least = torch.arange(size)
        self._reached: dict[str, tuple[Tensor, Tensor]] = {}

    def join(self, reached: Tensor, atoms: Tensor, name: str) -> None:
        """Adds the atoms of site `name`.

        Args:
            reached: channels that they reach.
            atoms: the number of the atom that reaches each; each reaches one at least.
        """
        self.covered[reached] = True
        self._reached[name] = reached, atoms

    def sets(self) -> tuple[int, Tensor, dict[str, Tensor]]:
        """Returns how many sets there are, numbered by their first channel, and in which each channel is, and each atom
        of each site."""
        least = self._least
        while True:
            before = least
            for reached, atom in self._reached.values():
                of_atom = self._of_atoms(least, reached, atom)
                least = least.scatter_reduce(0, reached, of_atom[atom], "amin")
            # A channel's set is at least as low as that of the channel after which its set is called.
            least = torch.minimum(least, least[least])
            if torch.equal(least, before):
                break
        first, units = torch.unique(least, return_inverse=True)
        return (
            len(first),
            units,
            {name: self._of_atoms(units, reached, atom) for name, (reached, atom) in self._reached.items()},
        )

    @staticmethod
    def _of_atoms(of_channels: Tensor, reached: Tensor, atom: Tensor) -> Tensor:
        """Returns of each atom the least that its channels have."""
        start = torch.full((int(atom.max()) + 1,), len(of_channels))
        return start.scatter_reduce(0, atom, of_channels[reached], "amin")


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
