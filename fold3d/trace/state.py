"""Where code around a model's blocks keeps values from one forward to the next: attributes of modules and of objects
that these hold (`holders`), and which of them code behind the blocks changes (`StateBehind`).
"""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import itertools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold3d.trace.blocks import modules_around

PLAIN: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Of values by which code may decide."""
CONTAINERS: frozenset[type] = frozenset((dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque))
"""Of values in which it may keep others."""
MOST = 1000
"""Entries of a container that is looked into: a data set has more."""
MOST_COPIED = 1 << 20
"""Elements of tensors and arrays that are copied although nobody has written to them so far."""
ABSENT = object()
"""In the place of a value that is not there."""
OTHER = object()
"""In the place of a value that is not looked at."""
PYTHONS_OWN = frozenset(sys.stdlib_module_names) - {"__main__", "argparse", "collections", "types"}
"""Packages of Python whose objects keep nothing for a model."""
ITERATORS: tuple[type, ...] = (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))
"""Of which a copy goes on by itself."""
_FRAMEWORKS = PYTHONS_OWN | frozenset(
    ("accelerate", "datasets", "evaluate", "fold3d", "numpy", "peft", "tokenizers", "torch", "tqdm", "transformers")
)
"""Packages whose objects are not looked into where they are attributes of the user's: no loss function sets theirs."""
_LIBRARIES = PYTHONS_OWN | {"fold3d", "numpy", "torch"}
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of attributes that all modules have, and that are not the user's."""
_NO_HOLDERS = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.dtype)


def _slots_of(kind: type) -> tuple[str, ...]:
    found = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


slots_of: Callable[[type], tuple[str, ...]] = functools.lru_cache(maxsize=1024)(_slots_of)
"""Returns the names of attributes that objects of a class have slots for."""


def attributes_of(holder: object) -> dict[str, Any]:
    """Returns the attributes that an object has."""
    held: dict[str, Any] = getattr(holder, "__dict__", {})
    slots = slots_of(type(holder))
    return {**held, **{name: getattr(holder, name) for name in slots if hasattr(holder, name)}} if slots else held


class Position(NamedTuple):
    """In the place of an iterator that cannot be copied, such as a generator: where it is."""

    iterator: Any
    at: Any


def position_of(iterator: Any) -> Any:
    """Returns what differs once an iterator has moved on; None where nothing tells."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return frame and (frame.f_lasti, dict(frame.f_locals), iterator.gi_yieldfrom)
    try:
        return iterator.__reduce__()[1:]
    except Exception:  # whatever says that it cannot be pickled, as files do
        return None


def set_attribute(holder: object, name: str, value: Any) -> None:
    """Sets an attribute past what the class does about that; takes it away where `value` is ABSENT."""
    if name in slots_of(type(holder)):
        object.__delattr__(holder, name) if value is ABSENT else object.__setattr__(holder, name, value)
    elif value is ABSENT:
        vars(holder).pop(name, None)
    else:
        vars(holder)[name] = value


def is_users_object(value: Any) -> bool:
    """Whether a value is an object with attributes whose class is the user's."""
    return has_attributes(value) and not isinstance(value, FunctionType) and is_users(type(value).__module__)


def has_attributes(one: object) -> bool:
    """Whether a value is an object with attributes, and no class, function of C, tensor or container."""
    if isinstance(one, (type, ModuleType, Tensor, BuiltinFunctionType, dict, set, frozenset, list, tuple, deque)):
        return False
    return isinstance(getattr(one, "__dict__", None), dict) or (
        hasattr(one, "__slots__") and is_users(type(one).__module__)
    )


def _is_others_iterator(kind: type) -> bool:
    return issubclass(kind, Iterator) and not is_users(kind.__module__)


is_others_iterator: Callable[[type], bool] = functools.lru_cache(maxsize=1024)(_is_others_iterator)
"""Whether a class is of iterators, and not the user's: it does not tell where one is, but for `position_of`."""


def is_users(module: str | None) -> bool:
    """Whether a module of that name is the user's code."""
    return (module or "").partition(".")[0] not in _FRAMEWORKS


def holders(modules: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Returns whose attributes the code of some modules, or objects, may set, by path, such as "head", "head.memory",
    "caches[0]".

    These are the modules, unless they are torch's own, and what has attributes in theirs, or in containers there, but
    for objects of Python's and of torch's.
    """
    found: dict[str, object] = {}
    seen = set[int]()
    todo: deque[tuple[str, object]] = deque(one for one in modules if not type(one[1]).__module__.startswith("torch."))
    while todo:
        path, one = todo.popleft()
        if id(one) not in seen and len(found) < MOST:
            seen.add(id(one))
            found[path] = one
            for name, value in attributes_of(one).items():
                if name not in OF_EVERY_MODULE or not isinstance(one, nn.Module):
                    todo.extend(_inside(f"{path}.{name}".lstrip("."), value))
    return found


class HeldObjects:
    """What modules hold that has attributes, with all that it holds, as `holders`, for who asks again and again."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        self._looks: list[tuple[object, ...]] = [()] * len(self._modules)
        self._names: list[list[str]] = [[]] * len(self._modules)
        """Of each module the attributes that may hold others, which its look tells: names and classes of all."""

    def now(self) -> dict[str, object]:
        """Returns them by path."""
        held: list[tuple[str, object]] = []
        for number, (path, module) in enumerate(self._modules):
            attributes = module.__dict__
            look = (*attributes, *map(type, attributes.values()))
            if look != self._looks[number] or slots_of(type(module)):
                self._looks[number] = look
                self._names[number] = [
                    name
                    for name, value in attributes_of(module).items()
                    if name not in OF_EVERY_MODULE and (type(value) in CONTAINERS or _has_others(value))
                ]
            for name in self._names[number]:
                held += _inside(f"{path}.{name}".lstrip("."), attributes_of(module).get(name))
        return holders(held) if held else {}


def _inside(path: str, value: Any) -> Iterator[tuple[str, object]]:
    kind = type(value)
    if kind in CONTAINERS:
        if len(value) <= MOST:
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _inside(f"{path}[{key!r}]", one)
    elif _has_others(value):
        yield path, value


def _has_others(value: Any) -> bool:
    """Whether a value, no container, has attributes in which it may keep others for a model."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, _NO_HOLDERS) or kind.__module__.partition(".")[0] in _LIBRARIES:
        return False
    return bool(hasattr(value, "__dict__") or slots_of(kind))


class View(MutableMapping[str, Any]):
    """Values that lie elsewhere."""

    def objects(self) -> tuple[object, ...]:
        """Returns names and values, or others of which one is another object once a value is: quicker to look at."""
        return (*self, *self.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Cells(View):
    """Variables of a function around a function."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def objects(self) -> tuple[object, ...]:
        try:
            return tuple([cell.cell_contents for cell in self._cells.values()])
        except ValueError:  # one is not set yet
            return super().objects()

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it is not set yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields the tensors in a value: in containers, however deep, in attributes of objects, and in what a function has
    around it or is given once for all.

    Args:
        seen: identities of objects that are not looked into once more.
    """
    todo, known = [value], set[int]() if seen is None else seen
    most = len(known) + MOST
    while todo and len(known) < most:
        one = todo.pop()
        if isinstance(one, Tensor):
            yield one
        elif type(one) in PLAIN or isinstance(one, (nn.Module, type, ModuleType, torch.dtype)) or id(one) in known:
            continue
        else:
            known.add(id(one))
            todo += [leaf for leaf in tree_leaves(one) if leaf is not one]
            if isinstance(one, FunctionType):
                todo += Cells(one).values()
            elif isinstance(one, functools.partial):
                todo += [*one.args, *one.keywords.values()]
            elif isinstance(one, MethodType):
                todo.append(one.__self__)
            else:
                todo += attributes_of(one).values()


def plain(value: Any, *, others: bool = False) -> Any:
    """Returns `value`, in containers, arrays, iterators and random generators of its own, if it is plain: of PLAIN, a
    tensor without a gradient, another number or text, an array, an iterator of ITERATORS, a random generator, or such
    in containers and in frozen data classes. Of other iterators their Position.

    Args:
        others: other objects stay what they are; else a value with one is OTHER.
    """
    kind = type(value)
    if kind in PLAIN or value is ABSENT or (isinstance(value, Tensor) and not value.requires_grad):
        return value
    if kind not in CONTAINERS:
        copied = _copied(kind)
        return copied(value, others) if copied is not None else value if others else OTHER
    if others and len(value) > MOST:
        return value
    inside = [plain(one, others=others) for one in (value.values() if isinstance(value, dict) else value)]
    if any(one is OTHER for one in inside):
        return OTHER
    made: Any = dict(zip(value, inside, strict=True)) if isinstance(value, dict) else inside
    if kind is defaultdict:
        return defaultdict(value.default_factory, made)
    return deque(made, value.maxlen) if kind is deque else kind(made)


_Copied = Callable[[Any, bool], Any]


def _how_copied(kind: type) -> _Copied | None:
    if issubclass(kind, (Enum, Position, np.generic, range, *PLAIN)):
        return lambda value, others: value
    if issubclass(kind, tuple):
        return _copied_tuple if hasattr(kind, "_make") else None
    if issubclass(kind, torch.Generator):
        return _copied_generator
    if kind in (random.Random, np.random.RandomState, np.random.Generator):
        return lambda value, others: copy.deepcopy(value)
    if kind is np.ndarray:
        return lambda value, others: value.copy() if value.size <= MOST_COPIED else value if others else OTHER
    if kind in (bytearray, array.array, *ITERATORS):
        return lambda value, others: copy.copy(value)
    if is_others_iterator(kind):
        return lambda value, others: Position(value, plain(position_of(value), others=True))
    if issubclass(kind, (dict, list, set, deque)):
        return _copied_container
    return _copied_fields if dataclasses.is_dataclass(kind) and _is_frozen(kind) else None


_copied: Callable[[type], _Copied | None] = functools.lru_cache(maxsize=1024)(_how_copied)
"""Returns what `plain` does with values of a class that is not in PLAIN or CONTAINERS; None: nothing."""


def _copied_generator(value: torch.Generator, others: bool) -> Any:
    if value is torch.default_generator:  # it is seeded for each micro-batch
        return value if others else OTHER
    return value.clone_state()


def _is_frozen(kind: Any) -> bool:
    return bool(kind.__dataclass_params__.frozen)


def _copied_tuple(value: Any, others: bool) -> Any:
    inside = plain(tuple(value), others=others)
    return inside if inside is OTHER else type(value)._make(inside)


def _copied_container(value: Any, others: bool) -> Any:
    """Of a class of its own: `collections.Counter`, say."""
    base: Any = next(one for one in (OrderedDict, dict, list, set, deque) if isinstance(value, one))
    inside = plain(deque(value, value.maxlen) if base is deque else base(value), others=others)
    if inside is OTHER or len(value) > MOST:
        return value if others else OTHER
    made = copy.copy(value)
    base.clear(made)
    (base.extend if base in (list, deque) else base.update)(made, inside)
    return made


def _copied_fields(value: Any, others: bool) -> Any:
    made = copy.copy(value)
    for one in dataclasses.fields(value):
        inside = plain(getattr(value, one.name, ABSENT), others=others)
        if inside is OTHER:
            return OTHER
        if inside is not ABSENT:
            object.__setattr__(made, one.name, inside)
    return made


def _state_of(one: Any) -> Any:
    """Returns the state of a random generator or of an iterator, plain; None for other values."""
    if isinstance(one, ITERATORS):
        return position_of(one)
    if isinstance(one, torch.Generator):
        return one.device.type, one.get_state().numpy()
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    return one.get_state(legacy=False) if isinstance(one, np.random.RandomState) else None


def same(one: Any, other: Any, are_same: Callable[[Tensor, Tensor], bool] | None = None) -> bool:
    """Whether two values are the same plain ones; any other object is only itself.

    Args:
        are_same: which tensors are the same; None: each is only itself.
    """
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return are_same is not None and bool(are_same(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and same(list(one.values()), list(other.values()), are_same)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(mine, its, are_same) for mine, its in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if (state := _state_of(one)) is not None:
        return same(state, _state_of(other))
    if dataclasses.is_dataclass(kind) and _is_frozen(kind):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name, ABSENT), getattr(other, name, ABSENT), are_same) for name in names)
    is_known = isinstance(one, (*PLAIN, set, frozenset, range, bytearray, array.array, np.generic))
    return is_known and bool(one == other)


class StateBehind:
    """Which attributes code behind the last block of a model changes, in one forward that is recorded."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self._modules = modules_around(model, blocks)
        self._before = [self._now()]
        """In front of the forward, and behind the last block so far."""

    def note(self) -> None:
        """A block has run."""
        self._before[1:] = [self._now()]

    def changed(self, is_behind: Callable[[Tensor], bool]) -> tuple[list[str], list[str]]:
        """Returns, by path, attributes that have been changed, or into which came what the last block has made; and
        entries of dictionaries among them of which this is not so.

        Args:
            is_behind: whether the last block, or code behind it, has made or written a tensor.
        """

        def is_kept(value: Any, then: Iterable[Any]) -> bool:
            made = any(isinstance(leaf, Tensor) and is_behind(leaf) for leaf in tree_leaves(value))
            return not made and any(same(value, one) for one in then)

        changed, kept = [], []
        now = self._now()
        for key in {**self._before[-1], **now}:
            value, name = now.get(key, ABSENT), ".".join(filter(None, key))
            then = [one[key] for one in self._before if key in one]
            if isinstance(value, dict):
                entries = [one if isinstance(one, dict) else {} for one in then]
                mine = [k for k, one in value.items() if is_kept(one, [old[k] for old in entries if k in old])]
                if len(mine) < max(map(len, (value, *entries))):  # or an entry is gone
                    changed.append(name)
                    kept += [f"{name}[{k!r}]" for k in mine]
            elif not is_kept(value, then):
                changed.append(name)
        return changed, kept

    def _now(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): value if type(value) in PLAIN else plain(value, others=True)
            for path, holder in holders(self._modules).items()
            for name, value in attributes_of(holder).items()
            if type(value) in PLAIN or name not in OF_EVERY_MODULE or not isinstance(holder, nn.Module)
        }


SHARED_STATE = (
    "block '{0}' changes {2!r}, and block '{1}' goes on with it, which a chunk without the first of them would not "
    "find: give each block its own, or pass a tensor from block to block"
)


class StateBetween:
    """Values that blocks hand to each other in attributes of the user's objects and modules, and in containers, that
    several of them have or are called with, such as a count of the blocks so far. A chunk without the first of these
    blocks would find what was there before it.

    What only one block of a forward changes (a table that grows) does not count, nor do tensors, whose reads a
    recording follows.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        """Args:
        blocks: names, in the order of the forward; one that runs several times is there as often.
        """
        found: dict[int, tuple[int, Any, str]] = {}
        for block in blocks:
            inside = holders((name, one) for name, one in model.get_submodule(block).named_modules())
            mine: dict[int, tuple[Any, str]] = {}
            for one in filter(is_users_object, inside.values()):
                mine[id(one)] = one, ""
                held = attributes_of(one).items()
                mine |= {id(value): (value, name) for name, value in held if type(value) in (dict, list, set, deque)}
            for key, (one, name) in mine.items():
                found[key] = 1 + found.get(key, (0,))[0], one, name
        self._shared = [(one, name) for count, one, name in found.values() if count > 1]
        self._given: dict[int, tuple[Any, str]] = {}
        """What blocks of this forward are called with, by the number of the object."""
        self._called_with: set[int] = set()
        self._held: set[int] = set()
        """Of the block that runs: what it is called with, and tensors that were in any argument before."""
        self._then: dict[tuple[int, str], Any] = {}
        self._by: dict[tuple[int, str], Any] = {}
        """Of what has changed in this forward: the block that did it first."""

    def __bool__(self) -> bool:
        """Whether blocks have anything in common."""
        return bool(self._shared)

    def begin(self) -> None:
        """A forward, or its part that is a chunk, begins."""
        self._by.clear()
        self._given.clear()

    def given(self, arguments: Mapping[str, Any]) -> None:
        """The block that runs is called with these."""
        for name, one in arguments.items():
            if id(one) not in self._given and (type(one) in _COUNT or is_users_object(one)):
                self._given[id(one)] = one, name
                self._then[id(one), ""] = _counts(one)
        self._called_with = {id(one) for one in arguments.values()}
        self._held = {id(tensor) for _, tensor in self._tensors()}

    def put(self) -> list[tuple[str, Tensor]]:
        """Returns tensors that the block has put into what it was called with, and into containers and objects that
        several blocks have, each with the name of these."""
        return [(name, tensor) for name, tensor in self._tensors() if id(tensor) not in self._held]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for one, name in (*self._given.values(), *self._shared):
            held = [one]
            if isinstance(one, nn.Module):
                held = [value for key, value in attributes_of(one).items() if key not in OF_EVERY_MODULE]
            for tensor in tensors_in(held):
                yield name or type(one).__name__, tensor

    def enter(self) -> None:
        """A block runs next."""
        self._then = self._now()

    def leave(self, block: Any) -> list[tuple[str, Any]]:
        """The block, as its name or its number, has run. Returns attributes that it has changed, and arguments that it
        was called with, each with the block that has changed it before."""
        found: list[tuple[str, Any]] = []
        now = self._now()
        for key, value in now.items():
            if key not in self._then:
                continue
            changed = not same(value, self._then[key])
            if changed or (not key[1] and key[0] in self._called_with):
                if key in self._by:
                    one, name = self._given[key[0]] if not key[1] else self._shared[key[0]]
                    found.append((name or f"{type(one).__name__}.{key[1]}", self._by[key]))
                if changed:
                    self._by.setdefault(key, block)
        self._then = now  # parts of a micro-batch take turns in a block: the other one has not changed it as well
        return found

    def _now(self) -> dict[tuple[int, str], Any]:
        return {
            (number, key): kept
            for number, (one, name) in enumerate(self._shared)
            for key, value in ([(name, one)] if name else attributes_of(one).items())
            if (name or key not in OF_EVERY_MODULE or not isinstance(one, nn.Module))
            and (kept := plain(value)) is not OTHER
            and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(kept))
        } | {(number, ""): _counts(one) for number, (one, _) in self._given.items()}


_COUNT = (dict, list, set, deque, np.ndarray, *ITERATORS)


def _counts(argument: Any) -> Any:
    """Returns what counts in an argument: what is plain in it, and how many others there are in a list."""
    if not isinstance(argument, _COUNT):
        argument = dict(attributes_of(argument))
    if isinstance(argument, dict):
        return {key: kept for key, one in argument.items() if (kept := _count(one)) is not OTHER}
    return [_count(one) for one in argument] if isinstance(argument, (list, deque)) else plain(argument)


def _count(value: Any) -> Any:
    if type(value) in (dict, list, deque):
        return _counts(value)
    return OTHER if any(True for _ in tensors_in(value)) else plain(value)
