"""fold3d/_C.pyi, which the type checker reads, names what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

import torch  # noqa: F401  loads the libraries that _C is linked with

from fold3d import _C

STUB = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_top_level_names():
    stubbed = {node.name for node in STUB.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert public(stubbed) == public(dir(_C))


def test_members():
    for node in STUB.body:
        if isinstance(node, ast.ClassDef):
            functions = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            values = {t.id for item in node.body if isinstance(item, ast.Assign) for t in item.targets}
            values |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
            made = getattr(_C, node.name)
            if issubclass(made, Exception):
                continue
            has = public(dir(made))
            if hasattr(made, "__members__"):
                has -= {"name", "value"}  # of every enumeration
            assert public(functions | values) == has, node.name


def test_parameters():
    """pybind11 writes the signature into the docstring."""
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            signature = getattr(_C, node.name).__doc__.splitlines()[0]
            for argument in node.args.args:
                assert f"{argument.arg}:" in signature, (node.name, argument.arg)
