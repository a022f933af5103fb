"""What a block of Python on a page says about fold3d, checked without running it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import transformers

import fold3d

USUAL: dict[str, type] = {"engine": fold3d.Engine, "trainer": fold3d.Trainer, "args": fold3d.TrainingArguments}
"""What these names stand for on every page, unless a block says otherwise."""


def complaints(code: str) -> Iterator[str]:
    """Yields what is wrong: names and attributes of fold3d that do not exist, arguments that its functions do not take.

    Raises: SyntaxError where the block is no Python.
    """
    tree = ast.parse(code)
    known: dict[str, Any] = dict(USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fold3d":
                    known[alias.asname or "fold3d"] = importlib.import_module(alias.name if alias.asname else "fold3d")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fold3d":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    yield f"{node.module} has no {alias.name}"
                else:
                    known[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _found(node.value, known)
            if owner is not None and not _has(owner, node.attr):
                yield f"{ast.unparse(node)}: {getattr(owner, '__name__', owner)} has no {node.attr}"
        elif isinstance(node, ast.Call):
            yield from _unknown_arguments(node, _found(node.func, known))


def _found(node: ast.expr, known: dict[str, Any]) -> Any:
    """Returns the object that an expression names; None where that cannot be told."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _found(node.value, known)
        if owner is fold3d.Trainer and node.attr in USUAL:
            return USUAL[node.attr]
        found = None if owner is None else getattr(owner, node.attr, None)
        if isinstance(found, property):
            returned = inspect.get_annotations(found.fget or _found, eval_str=True).get("return")
            return returned if isinstance(returned, type) else None
        return found
    return None


def _has(owner: Any, attribute: str) -> bool:
    if hasattr(owner, attribute) or attribute in getattr(owner, "__annotations__", {}):
        return True
    made = [
        kind for kind in getattr(owner, "__mro__", ()) if kind.__module__.split(".")[0] in ("fold3d", "transformers")
    ]
    return any(f"self.{attribute}" in inspect.getsource(kind) for kind in made)


def _unknown_arguments(call: ast.Call, function: Any) -> Iterator[str]:
    if not callable(function) or inspect.isbuiltin(function):
        return
    function = transformers.Trainer if function is fold3d.Trainer else function  # it hands its arguments on
    taken = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in taken:
            yield f"{ast.unparse(call.func)} takes no {keyword.arg}"
