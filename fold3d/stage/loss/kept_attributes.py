"""KeptAttributes: what a loss function keeps in objects of the user's, and of random generators, between its halves."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fold3d.device import library_rng_state, set_library_rng_state
from fold3d.trace.errors import SplitError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, deque)
_MOST = 1000
"""Entries of a container that is looked at: a data set is none of these."""
_UNKNOWN = (object(), None)

Version = Any
"""What differs once a value has changed."""


class KeptAttributes:
    """Attributes that a coroutine has set when it rests have the same values when it goes on, whatever others have set
    meanwhile; and behind it what those have set is there again, so that a counter counts them all.

    Numbers, text, tensors and small containers of them are looked at. So are random generators of the user's, and
    Python's and numpy's own: they go on where they were when it rested, and behind it are as before, because only a
    process with the model's last chunk draws there.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = [vars(one) for one in owners if hasattr(one, "__dict__")]
        self._before: list[dict[str, Version]] = []
        self._kept: list[dict[str, tuple[Version, Any]]] = []
        self._states: list[Any] = []

    def begin(self) -> None:
        """The coroutine begins."""
        self._before = [versions(owner) for owner in self._owners]

    def rest(self) -> None:
        """It rests."""
        self._kept = [
            {name: (version(owner[name]), _copied(owner[name], before.get(name))) for name in changed(before, owner)}
            for owner, before in zip(self._owners, self._before, strict=True)
        ]
        self._states = [one.get() for one in self._generators()]

    def draw_on(self) -> None:
        """Python's and numpy's generators go on behind what the coroutine has drawn."""
        if self._states:
            _LIBRARIES.set(self._states[0])

    def _generators(self) -> list[_Generator]:
        values = [value for owner in self._owners for value in owner.values()]
        return [_LIBRARIES, *(of(value) for value in values for kind, of in _KINDS if isinstance(value, kind))]

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """While it goes on. Raises: SplitError when it changes once more what others have changed meanwhile."""
        generators = self._generators()
        states = [one.get() for one in generators]
        for one, state in zip(generators, self._states, strict=False):
            one.set(state)
        held: list[tuple[dict[str, Any], str, Any, Version]] = []
        for owner, kept in zip(self._owners, self._kept, strict=False):
            for name, (then, value) in kept.items():
                if version(owner.get(name)) != then:
                    held.append((owner, name, owner.get(name), version(value)))
                    owner[name] = value
        yield
        for one, state in zip(generators, states, strict=True):
            one.set(state)
        for owner, name, now, as_it_was in held:
            if version(owner.get(name)) != as_it_was:
                raise SplitError(
                    f"the loss function sets its attribute '{name}' before and behind the model's call, and in a model "
                    "that is cut other micro-batches begin in between: set it on one side only, or set pp=1 and "
                    "segments=1, where nothing is cut"
                )
            owner[name] = now


class _Generator(NamedTuple):
    """A random generator's functions."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


_LIBRARIES = _Generator(library_rng_state, set_library_rng_state)


def _of_numpy(one: np.random.Generator) -> _Generator:
    bits = one.bit_generator
    return _Generator(lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state))


_KINDS: tuple[tuple[type, Callable[[Any], _Generator]], ...] = (
    (random.Random, lambda one: _Generator(one.getstate, one.setstate)),
    (np.random.RandomState, lambda one: _Generator(one.get_state, one.set_state)),
    (np.random.Generator, _of_numpy),
    (torch.Generator, lambda one: _Generator(one.get_state, one.set_state)),
)


def versions(owner: dict[str, Any]) -> dict[str, Version]:
    """Returns the version of each attribute."""
    return {name: version(value) for name, value in owner.items()}


def changed(before: dict[str, Version], owner: dict[str, Any]) -> list[str]:
    """Returns the names of the attributes that have another version than `before`, as far as that is known."""
    now = versions(owner)
    return [name for name, one in now.items() if one is not _UNKNOWN and one != before.get(name)]


def version(value: Any) -> Version:
    """Returns what differs once `value` has changed; the same for all that is not looked at."""
    left = [_MOST]

    def of(one: Any) -> Any:
        left[0] -= 1
        if left[0] < (len(one) if isinstance(one, (dict, set, frozenset, *_LISTS)) else 0):
            raise OverflowError
        if isinstance(one, Tensor):
            return id(one), 0 if one.is_inference() else one._version
        if isinstance(one, dict):
            return dict, tuple((key, of(each)) for key, each in one.items())
        if isinstance(one, _LISTS):
            return type(one), tuple(map(of, one))
        if isinstance(one, (set, frozenset)) and all(isinstance(each, _PLAIN) for each in one):
            return frozenset, frozenset(one)
        if isinstance(one, _PLAIN):
            return type(one), one
        raise TypeError

    try:
        return of(value)
    except (OverflowError, TypeError):
        return _UNKNOWN


def _copied(value: Any, before: Version = None) -> Any:
    """Returns the value with containers of its own; a tensor that was written to, copied."""
    if isinstance(value, Tensor):
        return value.detach().clone() if before is not None and version(value)[0] == before[0] else value
    if type(value) is tuple:
        return tuple(map(_copied, value))
    if not isinstance(value, (dict, list, deque, set)):
        return value
    made: Any = copy.copy(value)
    if isinstance(value, dict):
        for key, one in value.items():
            made[key] = _copied(one)
    elif not isinstance(value, set):
        for number, one in enumerate(value):
            made[number] = _copied(one)
    return made
