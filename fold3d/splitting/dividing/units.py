"""Units: what of a region cannot be divided, such as heads, groups of heads that share keys, neurons."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fold3d.splitting.probing.reach import Atom


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
