"""Atoms: runs of channels that reach the same, found with few runs of a block."""

from __future__ import annotations

import itertools
import math
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
    apart all at once by the bits of words: the block is run once for each bit.
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
            found = self._by_words(first, length, window)
            if found:
                self._remember(known, window)
                self._failures[length] = 0
                return found
        self._failures[length] = self._failures.get(length, 0) + 1
        return []

    def _by_words(self, first: int, length: int, window: int) -> list[Atom]:
        """Returns `window` runs if nothing is reached by several of them, or as many of these as are atoms.

        Each has a word of as many bits as the others' words. A place has the bits of the words of the runs that reach
        it: if one does, its word, and if several do, more bits.
        """
        words = _words(window)
        runs = torch.arange(first, first + window * length).view(window, length)
        weight, top = int(words[0]).bit_count(), int(words[0]).bit_length() - 1
        codes: dict[str, Tensor] = {}
        bits: dict[str, Tensor] = {}
        for bit in range(top, -1, -1):
            having = (words >> bit & 1).bool()
            response = self._respond(runs[having].flatten())
            if response.leaks:
                return []
            for name, reached in response.sinks.items():
                codes[name] = codes.get(name, torch.zeros(len(reached), dtype=torch.long)) + (reached.long() << bit)
                bits[name] = bits.get(name, torch.zeros(len(reached), dtype=torch.long)) + reached
            if any(bool((seen > weight).any()) for seen in bits.values()):
                return []
            if bit == top:  # runs that are far apart are the likeliest to reach the same
                others = self._respond(runs[~having].flatten())
                if any(bool((at & bits[name].bool()).any()) for name, at in others.sinks.items() if name in bits):
                    return []
        places: list[dict[str, Tensor]] = [{} for _ in range(window)]
        ascending = words.flip(0)
        for name, code in codes.items():
            here = code.nonzero().flatten()
            if bool((bits[name][here] != weight).any()):
                return []
            run = window - 1 - torch.searchsorted(ascending, code[here])
            order = torch.argsort(run, stable=True)
            values, counts = torch.unique_consecutive(run[order], return_counts=True)
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


def _words(count: int) -> Tensor:
    """Returns so many different whole numbers, the largest first, all with as many bits set, and few of those."""
    length = next(length for length in itertools.count(1) if math.comb(length, length // 2) >= count)
    chosen = itertools.combinations(range(length - 1, -1, -1), length // 2)
    return (1 << torch.tensor(list(itertools.islice(chosen, count)))).sum(1)


def _atom(first: int, end: int, response: Response) -> Atom:
    sinks = {name: mask.nonzero().flatten() for name, mask in response.sinks.items()}
    return Atom(first, end, sinks, response.leaks)
