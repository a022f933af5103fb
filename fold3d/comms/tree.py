"""Tree: who meets whom where many ranks exchange something small, so that none talks to more than a few."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

FAN_OUT = 4
"""Members below a member. More of them: fewer levels, more connections per process."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree over the members 0 ... size - 1. A subtree is a range of them that begins with its top.

    A member meets two families: its children and itself, and its siblings and parent. In a family all are connected.
    """

    size: int
    fan_out: int = FAN_OUT

    def parent(self, member: int) -> int | None:
        """Returns the member above, None for member 0."""
        return self._find(member)[0]

    def subtree(self, member: int) -> range:
        """Returns `member` and all below it."""
        return self._find(member)[1]

    def children(self, member: int) -> list[int]:
        """Returns the members directly below, in ascending order."""
        return [part.start for part in self._parts(self.subtree(member))]

    def family(self, member: int) -> list[int]:
        """Returns `member` and its children."""
        return [member, *self.children(member)]

    def connections(self, member: int) -> int:
        """Returns how many others `member` is connected with: at most 2 * fan_out, however many there are."""
        above = self.parent(member)
        return len(self.children(member)) + (0 if above is None else len(self.children(above)))

    def one_way(self) -> int:
        """Returns how many messages bring something from all members to member 0, or from it to all."""
        return self.size - 1

    def levels(self) -> int:
        """Returns how many families lie between member 0 and the lowest members."""
        count, span = 0, range(self.size)
        while parts := self._parts(span):
            count, span = count + 1, parts[-1]  # the last part is never smaller than the others
        return count

    def _parts(self, span: range) -> list[range]:
        """Returns the subtrees directly below the top of the subtree `span`, as equal as can be."""
        below = len(span) - 1
        count = min(self.fan_out, below)
        bounds = [span.start + 1 + below * k // count for k in range(count + 1)] if count else []
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _find(self, member: int) -> tuple[int | None, range]:
        if not 0 <= member < self.size:
            raise ValueError(f"member {member} is outside a tree of {self.size}")
        above, span = None, range(self.size)
        while span.start != member:
            above = span.start
            span = next(part for part in self._parts(span) if member in part)
        return above, span
