"""Atoms: runs of channels that reach the same, found with few runs of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fold3d.sharding.split import Path
from fold3d.splitting.probing.probe import Places, Response

Respond = Callable[[Places], Response]
"""What NaN in some channels reaches."""

_WINDOW = 4096
_PATIENCE = 8
"""Places in a row from which no channels could be told apart, before that is given up."""


@dataclass(frozen=True, slots=True)
class Atom:
    """Channels [first, end) of which the first reaches what all of them together reach."""

    first: int
    end: int
    sinks: dict[str, Tensor]
    """Site -> indices of the channels of its input, ascending."""
    leaks: frozenset[Path]


def atoms(respond: Respond, size: int) -> list[Atom]:
    """Returns the channels [0, size) as atoms, in order.

    Channels that go together (of a head's queries) are found by extending a run as long as it reaches nothing new. Runs
    of that length behind it that each reach something of their own (heads; neurons, which are runs of one) are told
    apart all at once by the bits of their numbers: the block is run twice for each bit.
    """
    return list(_Search(respond, size).walk())


class _Search:
    def __init__(self, respond: Respond, size: int) -> None:
        self._respond = respond
        self._size = size
        self._lengths: list[int] = []  # of runs found, the latest first
        self._windows: dict[int, list[int]] = {}  # of runs of that length
        self._failures: dict[int, int] = {}

    def walk(self) -> Iterator[Atom]:
        everything = self._respond(range(self._size))
        if not everything.sinks:
            yield _atom(0, self._size, everything)
            return
        position = 0
        while position < self._size:
            single = self._respond([position])
            length = self._run_length(position, single)
            found = self._alike(position, length) or [_atom(position, position + length, single)]
            yield from found
            position = found[-1].end

    def _run_length(self, first: int, single: Response) -> int:
        """Returns how many channels from `first` reach nothing but what the first one reaches."""
        rest = self._size - first
        for length in (rest, *self._lengths):
            if 1 < length <= rest and self._respond(range(first, first + length)).same(single):
                self._remember(self._lengths, length)
                return length
        if self._lengths and self._lengths[0] == 1:
            return 1
        low, high = 1, rest  # `low` is long enough, `high` too long
        while high - low > 1:
            middle = min(2 * low, (low + high) // 2)
            if self._respond(range(first, first + middle)).same(single):
                low = middle
            else:
                high = middle
        self._remember(self._lengths, low)
        return low

    def _alike(self, first: int, length: int) -> list[Atom]:
        """Returns runs of a length from `first` on that each reach something of their own, as far as they can be told
        apart."""
        if self._failures.get(length, 0) == _PATIENCE:
            return []
        rest = (self._size - first) // length
        known = self._windows.setdefault(length, [])
        sizes = [*known, rest]
        window = min(_WINDOW, rest)
        while window > 1 and (length > 1 or not known):
            sizes.append(window)
            window //= 2
        for window in dict.fromkeys(size for size in sizes if 1 < size <= rest):
            found = self._by_bits(first, length, window)
            if found:
                self._remember(known, window)
                self._failures[length] = 0
                return found
        self._failures[length] = self._failures.get(length, 0) + 1
        return []

    def _by_bits(self, first: int, length: int, window: int) -> list[Atom]:
        number = torch.arange(window)
        runs = torch.arange(first, first + window * length).view(window, length)
        codes: dict[str, Tensor] = {}
        reached: dict[str, Tensor] = {}
        for bit in reversed(range((window - 1).bit_length())):  # what is far apart is the likeliest to reach the same
            sides = []
            for value in (0, 1):
                sides.append(self._respond(runs[number >> bit & 1 == value].flatten()))
                if sides[-1].leaks:
                    return []
            zero, one = (side.sinks for side in sides)
            for name in zero.keys() | one.keys():
                none = torch.zeros_like(zero.get(name, one.get(name)))  # type: ignore[arg-type]
                at_zero, at_one = zero.get(name, none), one.get(name, none)
                if bool((at_zero & at_one).any()):
                    return []
                codes[name] = codes.get(name, none.long()) + (at_one.long() << bit)
                reached[name] = reached.get(name, none) | at_zero | at_one
        places: list[dict[str, Tensor]] = [{} for _ in range(window)]
        for name, code in codes.items():
            here = reached[name].nonzero().flatten()
            order = torch.argsort(code[here], stable=True)
            values, counts = torch.unique_consecutive(code[here][order], return_counts=True)
            for value, indices in zip(values.tolist(), torch.split(here[order], counts.tolist()), strict=True):
                places[value][name] = indices
        count = window if length == 1 else self._led(first, length, places)
        if count < 2:
            return []
        return [
            Atom(first + k * length, first + (k + 1) * length, sinks, frozenset())
            for k, sinks in enumerate(places[:count])
        ]

    def _led(self, first: int, length: int, places: list[dict[str, Tensor]]) -> int:
        """Returns how many of the runs, from the first one on, reach all that they reach with their first channels."""
        sinks = self._respond(torch.arange(first, first + len(places) * length, length)).sinks
        for k, reached in enumerate(places):
            if any(name not in sinks or not bool(sinks[name][at].all()) for name, at in reached.items()):
                return k
        return len(places)

    @staticmethod
    def _remember(known: list[int], value: int) -> None:
        if value in known:
            known.remove(value)
        known.insert(0, value)
        del known[4:]


def _atom(first: int, end: int, response: Response) -> Atom:
    sinks = {name: mask.nonzero().flatten() for name, mask in response.sinks.items()}
    return Atom(first, end, sinks, response.leaks)
