"""Units: what of a region cannot be divided, such as heads, groups of heads that share keys, neurons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fold3d.splitting.probing.reach import Atom

Node = tuple[str, str, int]
"""A channel that goes in, or an atom of those that come out: ("in" or "out", site, number)."""


class UnionFind:
    """Disjoint sets of nodes, joined one pair at a time."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """Returns the node that stands for the set of `node`."""
        parent = self._parent
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, one: Node, other: Node) -> None:
        """Makes the sets of two nodes one."""
        self._parent[self.find(one)] = self.find(other)

    @property
    def nodes(self) -> list[Node]:
        """All nodes."""
        return list(self._parent)


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
    sets = UnionFind()
    covered = {row: torch.zeros(size, dtype=torch.bool) for row, size in rows.items()}
    for name, found in columns.items():
        for number, atom in enumerate(found):
            if number in left_out.get(name, ()):
                continue
            reached = False
            for row in rows:
                for channel in atom.sinks.get(row, torch.empty(0)).tolist():
                    sets.join(("out", name, number), ("in", row, channel))
                    reached = True
                if row in atom.sinks:
                    covered[row][atom.sinks[row]] = True
            if not reached:
                raise Mixed(f"output channel {atom.first} of {name} is not read")
    for row, mask in covered.items():
        if not mask.all():
            raise Mixed(f"input channel {int((~mask).nonzero()[0])} of {row} comes from elsewhere")
    members: dict[Node, list[Node]] = {}
    for node in sets.nodes:
        members.setdefault(sets.find(node), []).append(node)
    order = list(rows)

    def first_channel(nodes: list[Node]) -> tuple[int, int]:
        return min((order.index(name), index) for side, name, index in nodes if side == "in")

    ordered = sorted(members.values(), key=first_channel)
    kinds = {_kind(nodes, columns) for nodes in ordered}
    if len(kinds) != 1:
        raise Mixed(f"its {len(ordered)} units are not alike")
    of_rows = {row: torch.zeros(size, dtype=torch.long) for row, size in rows.items()}
    of_columns = {name: [-1] * len(found) for name, found in columns.items()}
    for unit, nodes in enumerate(ordered):
        for side, name, index in nodes:
            if side == "in":
                of_rows[name][index] = unit
            else:
                of_columns[name][index] = unit
    return Units(len(ordered), of_rows, of_columns)


def _kind(nodes: list[Node], columns: Mapping[str, list[Atom]]) -> frozenset[tuple[tuple[str, str], int]]:
    count: Counter[tuple[str, str]] = Counter()
    for side, name, index in nodes:
        count[side, name] += 1 if side == "in" else columns[name][index].end - columns[name][index].first
    return frozenset(count.items())
