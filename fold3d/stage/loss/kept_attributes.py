"""KeptAttributes: what a loss function sets, and where random generators are, between its halves."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fold3d.device import library_rng_state, set_library_rng_state
from fold3d.stage.loss.namespaces import (
    ABSENT,
    UNKNOWN,
    Kind,
    ModelState,
    Namespace,
    as_it_was,
    namespaces_of,
    version,
)
from fold3d.trace.errors import SplitError

_SET_IN_FRONT: dict[Kind, set[str]] = {}
"""By kind of namespace, the names that a first half has ever changed: another one may set them to what they are. What
was None or not there before may have been made once for all, and does not count."""
_NONE: frozenset[str] = frozenset()


def _set_in_front(kind: Kind, names: set[str], before: Mapping[str, Any]) -> None:
    known = {name for name in names if before.get(name) is not None}
    if known:
        _SET_IN_FRONT.setdefault(kind, set()).update(known)


class KeptAttributes:
    """What a coroutine has set when it rests is the same for the model's forward, and when it goes on, whatever others
    have set meanwhile; and behind it what those have set is there again, so that a counter counts them all.

    What is looked at: see `namespaces_of`, and the attributes of the model's modules. What the model's forward makes of
    a value that the first half has set is the micro-batch's, too. Random generators of the user's, and Python's and
    numpy's own, go on where they were when it rested, and behind it are as before, because only a process with the
    model's last chunk draws there.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = list(owners)
        self._spaces: list[Namespace] = []
        self._kept: list[dict[str, Any]] = []
        """By namespace, values by name."""
        self._names: dict[int, set[str]] = {}
        """By number of the namespace, the names that the first half has set; where there are any."""
        self._made: set[tuple[int, str]] = set()
        self._runs, self._held, self._comes_again = 0, list[_Held](), False
        self._at: dict[object, list[_Value]] = {}
        self._generators: list[_Generator] = []
        self._states: list[Any] = []

    @contextlib.contextmanager
    def first_half(self, model: nn.Module, state: ModelState) -> Iterator[None]:
        """While the coroutine runs up to where it rests.

        Raises: SplitError when it has changed which weights are trained.
        """
        trained = state.trained()
        own = namespaces_of(self._owners, model)
        values = [value for space in own for value in space.values.values()]
        self._generators = [_LIBRARIES, *(of(one) for one in values for kind, of in _KINDS if isinstance(one, kind))]
        self._spaces = [*own, *state.namespaces]
        before, before_of_model = [space.contents() for space in own], state.contents()
        with _noted([space for space in own if space.owner is not None]) as noted:
            yield
        if trained != state.trained():
            raise SplitError(
                "the loss function changes requires_grad of weights (a frozen layer, an adapter that is switched on) "
                "before the model's call, and in a model that is cut other micro-batches begin meanwhile: do that "
                "before training, or set pp=1 and segments=1, where nothing is cut"
            )
        for space, then in zip(own, before, strict=True):
            now = space.contents()
            names = now.changed(then)
            if space.owner is not None:
                names |= noted[id(space.owner)]
            else:
                _set_in_front(space.kind, names, then.values)
            if names:
                self._names[len(self._kept)] = names
            self._kept.append(now.kept(names | _SET_IN_FRONT.get(space.kind, _NONE), then))
        of_model = state.contents()
        changed = state.changed(of_model, before_of_model)
        for number, names in changed.items():
            _set_in_front(state.namespaces[number].kind, names, before_of_model[number])
            self._names[len(own) + number] = names
        if _SET_IN_FRONT:
            kinds = [_SET_IN_FRONT.get(space.kind, _NONE) for space in state.namespaces]
            changed = {number: {*names, *changed.get(number, _NONE)} for number, names in enumerate(kinds)}
        self._kept += state.kept(of_model, changed)
        self._states = [one.get() for one in self._generators]

    def draw_on(self) -> None:
        """Python's and numpy's generators go on behind what the coroutine has drawn."""
        if self._states:
            _LIBRARIES.set(self._states[0])

    @contextlib.contextmanager
    def in_the_model(self, run: object) -> Iterator[None]:
        """While the model's forward runs. A `run` that comes again finds what it found before, and leaves nothing; so
        does one on another part of the micro-batch, which may take turns with this one."""
        if not self._runs:
            self._comes_again = run in self._at
            self._held = [_Held(*one) for one in self._at.setdefault(run, self._values())]
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            for one in () if self._runs else self._held:
                if one.is_changed and not self._comes_again:
                    self._kept[one.number][one.name] = one.found
                    self._made.add((one.number, one.name))
                one.restore()

    @contextlib.contextmanager
    def behind_the_model(self) -> Iterator[None]:
        """While it goes on. Raises: SplitError when it changes once more what others have changed meanwhile."""
        states = [one.get() for one in self._generators]
        for one, state in zip(self._generators, self._states, strict=True):
            one.set(state)
        held = [_Held(*one) for one in self._values()]
        yield
        for one, state in zip(self._generators, states, strict=True):
            one.set(state)
        for value in held:
            if not value.is_changed:
                if (value.number, value.name) not in self._made:
                    value.restore()
            elif value.was_changed and not value.was_reset:
                raise SplitError(
                    f"the loss function sets '{value.name}' ({value.space.what}) before and behind the model's call, "
                    "and in a model that is cut other micro-batches begin in between: set it on one side only, or set "
                    "pp=1 and segments=1, where nothing is cut"
                )

    def _values(self) -> list[_Value]:
        """Returns the micro-batch's own values."""
        if not _SET_IN_FRONT and not self._names:
            return []  # most loss functions set nothing
        return [
            _Value(number, space, name, as_it_was(value))
            for number, (space, kept) in enumerate(zip(self._spaces, self._kept, strict=True))
            for name in self._names.get(number, _NONE) | _SET_IN_FRONT.get(space.kind, _NONE)
            if (value := kept.get(name, ABSENT)) is not UNKNOWN and (name in kept or name in space.values)
        ]


class _Value(NamedTuple):
    number: int
    """Of the namespace."""
    space: Namespace
    name: str
    value: Any


class _Held:
    """A value that a namespace has for a while instead of its own."""

    def __init__(self, number: int, space: Namespace, name: str, value: Any) -> None:
        self.number, self.space, self.name = number, space, name
        self._own = space.values.get(name, ABSENT)
        self._put = value, version(value)
        self._set(value)

    @property
    def found(self) -> Any:
        """What is there now."""
        return self.space.values.get(self.name, ABSENT)

    @property
    def is_changed(self) -> bool:
        """Whether it has changed since it was put there."""
        return self.found is not self._put[0] or version(self.found) != self._put[1]

    @property
    def was_changed(self) -> bool:
        """Whether others had set something else, which is not what is there now."""
        return version(self._own) not in (self._put[1], version(self.found))

    @property
    def was_reset(self) -> bool:
        """Whether what was put there, or is there now, tells nothing of what was there before, which a count or a sum
        would."""
        return _tells_nothing(self._put[0]) or _tells_nothing(self.found)

    def restore(self) -> None:
        """Puts back what was there."""
        self._set(self._own)

    def _set(self, value: Any) -> None:
        if value is not ABSENT:
            self.space.values[self.name] = value
        elif self.name in self.space.values:
            del self.space.values[self.name]


def _tells_nothing(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and not value.any()
    if isinstance(value, (bool, str)) or value is None or value is ABSENT:
        return True
    return isinstance(value, (int, float, dict, list, set, tuple, deque)) and not value


@contextlib.contextmanager
def _noted(spaces: Iterable[Namespace]) -> Iterator[dict[int, set[str]]]:
    """Yields, by the number of an object, the attributes of it that are set meanwhile, also those that are set to what
    they are; of objects whose attributes `spaces` are."""
    noted: dict[int, set[str]] = {id(space.owner): set() for space in spaces}
    undo = [_note(kind, noted) for kind in {type(space.owner) for space in spaces}]
    try:
        yield noted
    finally:
        for one in undo:
            one()


def _note(kind: Any, noted: dict[int, set[str]]) -> Callable[[], None]:
    own, original = vars(kind).get("__setattr__"), kind.__setattr__

    def note(self: Any, name: str, value: Any) -> None:
        if id(self) in noted:
            noted[id(self)].add(name)
        original(self, name, value)

    def undo() -> None:
        if own is None:
            del kind.__setattr__
        else:
            kind.__setattr__ = own

    kind.__setattr__ = note
    return undo


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
