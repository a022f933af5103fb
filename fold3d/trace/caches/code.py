"""Code: what forwards of a model may call, and where that can keep something."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_LRU_CACHE: type[Any] = type(functools.lru_cache(lambda: None))
_WRAPPERS = (staticmethod, classmethod, property, MethodType, functools.partial, functools.cached_property, _LRU_CACHE)
STORES = (dict, list)
_OTHERS = ("torch", "fold3d", "numpy", "builtins", "functools", "typing", "types", "abc", "collections")
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
    return str(home).partition(".")[0] in _OTHERS


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
