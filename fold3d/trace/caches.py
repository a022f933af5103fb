"""apart_from_caches(): what a model's code remembers of tensors without values, its training does not meet."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fold3d.trace.state import PYTHONS_OWN

_LRU_CACHE: type[Any] = type(functools.lru_cache(lambda: None))
_WRAPPERS = (staticmethod, classmethod, property, MethodType, functools.partial, functools.cached_property, _LRU_CACHE)
STORES = (dict, list)
_OTHERS = PYTHONS_OWN | {"collections", "fold3d", "numpy", "torch", "types"}
"""Packages whose code is not the model's."""


class Code:
    """The functions and classes that forwards of a model may call, as far as names in the code tell."""

    def __init__(self, model: nn.Module) -> None:
        self.results: list[Any] = []
        """Each `functools.lru_cache`, however it is wrapped."""
        self.variables: list[dict[str, Any]] = []
        """Of Python modules."""
        self.stores: list[Any] = []
        """Dictionaries and lists that functions name or hold."""
        self.classes: list[type] = []
        self._seen: dict[int, Any] = {}  # it holds them: else another object might get the same id
        self._names: set[str] = set()  # that functions ask objects for
        self._new_names = {"forward"}
        self._new_classes: list[type] = []
        todo: list[Any] = [type(module) for module in model.modules()]
        while todo:
            while todo:
                thing = todo.pop()
                if id(thing) not in self._seen:
                    self._seen[id(thing)] = thing
                    todo += self._enter(thing)
            todo = self._methods()

    def _enter(self, thing: Any) -> list[Any]:
        """Notes what `thing` may keep; returns what else may."""
        if isinstance(thing, _WRAPPERS):
            if isinstance(thing, _LRU_CACHE):
                self.results.append(thing)
            return _codes(getattr(thing, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        if isinstance(thing, STORES):
            self.stores.append(thing)
            return _codes(dict.values(thing) if isinstance(thing, dict) else thing)
        if _is_others(thing):
            return []
        if isinstance(thing, type):
            self._new_classes.append(thing)
            return list(thing.__mro__)
        assert isinstance(thing, FunctionType)
        variables, names = thing.__globals__, _names(thing.__code__)
        if id(variables) not in self._seen:
            self._seen[id(variables)] = variables
            self.variables.append(variables)
        self._new_names |= names - self._names
        named = [variables[name] for name in names if name in variables]
        for module in [one for one in named if isinstance(one, ModuleType) and not _is_others(one)]:
            named += [vars(module)[name] for name in names if name in vars(module)]
        held = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *vars(thing).values()]
        held += [cell.cell_contents for cell in thing.__closure__ or () if not _is_empty(cell)]
        return _codes([*named, *held])

    def _methods(self) -> list[Any]:
        """Returns what is found in known classes by new names, and by known names in new classes."""
        asked = [(one, self._new_names) for one in self.classes]
        self._names |= self._new_names
        asked += [(one, self._names) for one in self._new_classes]
        found = [vars(one)[name] for one, names in asked for name in vars(one).keys() & names]
        self.classes += self._new_classes
        self._new_names, self._new_classes = set(), []
        return _codes(found)


def _codes(things: Iterable[Any]) -> list[Any]:
    """Returns those of `things` that are code, or may keep something."""
    return [thing for thing in things if isinstance(thing, (FunctionType, type, *_WRAPPERS, *STORES))]


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_others(thing: Any) -> bool:
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    package = str(home).partition(".")[0]
    return package in _OTHERS or not _may_keep_tensors(package, len(sys.modules))


@functools.lru_cache(maxsize=1024)
def _may_keep_tensors(package: str, imported: int) -> bool:
    """Whether a package is the user's own, or one of its modules names anything of torch's: sympy, say, which is large,
    is neither.

    Args:
        imported: modules so far; more may.
    """
    path = str(getattr(sys.modules.get(package), "__file__", None))
    if "site-packages" not in path and "dist-packages" not in path:
        return True
    mine = [module for name, module in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
    return any(_is_of_torch(one) for module in mine for one in list(vars(module).values()))


def _is_of_torch(thing: Any) -> bool:
    """Whether it is one of torch's modules, functions or classes."""
    if isinstance(thing, ModuleType):
        return thing.__name__.partition(".")[0] == "torch"
    return isinstance(thing, (FunctionType, type)) and str(thing.__module__).partition(".")[0] == "torch"


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


_Test = Callable[[Any], bool]
_DEPTH = 4
"""Of containers within containers, and of these looked into."""


@contextmanager
def apart_from_caches(model: nn.Module) -> Iterator[None]:
    """Within this, code of the model's modules runs on tensors that nobody outside may meet: they lack values, or have
    another precision. They are in host memory, and the code meets none of a device that it remembered before.

    Looked at is what forwards may call, as far as names in the code tell. Its `functools.lru_cache`s, however they are
    wrapped, are cleared when they got new results and hold tensors. Of dictionaries and lists that it names or holds,
    and of variables of its Python modules and classes, those entries go again that hold tensors without values.
    """
    code = Code(model)
    _forget_results(code, _is_on_device)
    misses, before = _misses(code), _entries(code)
    try:
        yield
    finally:
        _forget_results(code, _is_tensor, misses)
        _put_back(code, before)


def forget_fakes(code: Code) -> None:
    """Clears the lru_caches that hold tensors without values: whoever calls next makes them again."""
    _forget_results(code, _is_fake)


def _misses(code: Code) -> list[int]:
    """Returns how often each lru_cache did not know a result."""
    return [cache.cache_info().misses for cache in code.results]


def _forget_results(code: Code, unwanted: _Test, misses: list[int] | None = None) -> None:
    """Clears the lru_caches that hold anything `unwanted`; of these only those with new results since `misses`."""
    for number, cache in enumerate(code.results):
        if misses is not None and cache.cache_info().misses == misses[number]:
            continue
        if any(_holds(part, unwanted) for part in gc.get_referents(cache)):
            cache.cache_clear()


def _entries(code: Code) -> list[dict[Any, Any]]:
    """Returns what all stores hold, and the classes' variables."""
    stores = [*code.variables, *code.stores, *map(vars, code.classes)]
    return [dict(_items(store)) for store in stores]


def _put_back(code: Code, before: list[dict[Any, Any]]) -> None:
    """Takes out what holds tensors without values; in its place comes what was there, in `before`."""
    left = iter(before)
    for variables in code.variables:  # a container there is a store as well, if code names it
        _clean(variables, next(left), 0)
    for store in code.stores:
        _clean(store, next(left), _DEPTH)
    for one in code.classes:
        old = next(left)
        for name in [name for name, value in vars(one).items() if _is_unwanted(value)]:
            if name in old:
                setattr(one, name, old[name])
            else:
                delattr(one, name)


def _clean(store: Any, old: dict[Any, Any], depth: int) -> None:
    """Takes out of a dictionary or list, and of those inside, what holds tensors without values."""
    for value in [value for _, value in _items(store) if isinstance(value, STORES)] if depth else ():
        _clean(value, {}, depth - 1)
    for key in reversed([key for key, value in _items(store) if _is_unwanted(value)]):
        if key in old:
            store[key] = old[key]
        else:
            del store[key]


def _items(store: Any) -> list[tuple[Any, Any]]:
    if isinstance(store, list):
        return list(enumerate(store))
    return list(dict.items(store) if isinstance(store, dict) else store.items())


def _is_unwanted(value: Any) -> bool:
    return not isinstance(value, STORES) and _holds(value, _is_fake)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _holds(value: Any, wanted: _Test, depth: int = _DEPTH) -> bool:
    if wanted(value):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(_holds(part, wanted, depth - 1) for pair in dict.items(value) for part in pair)
    return isinstance(value, list | tuple | set) and any(_holds(part, wanted, depth - 1) for part in value)
