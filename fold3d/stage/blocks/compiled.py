"""Compiled blocks: torch.compile for each block by itself, so that borders of chunks, hooks and names stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from fold3d.trace.wrappers import wrap


def compile_blocks(model: Module, blocks: Sequence[str], options: Mapping[str, Any]) -> Callable[[], None]:
    """Compiles the forwards of `blocks`, of the model where none are known; returns what undoes it.

    What lies around a block (its hooks, its seed, waiting for its weights, computing it again) runs as it is, and what
    is compiled is the block's own code. Compilation happens when a block first runs, and again for other shapes.

    Args:
        options: of torch.compile.
    """
    # What is computed again must run the code that ran first. By default the code that ran last is tried first, which
    # between a forward and its backward may have become that of another micro-batch's shapes.
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]
    undo = [lambda: torch._C._dynamo.eval_frame._set_lru_cache(True)]  # type: ignore[attr-defined]
    undo += [_compile(model.get_submodule(name), options) for name in blocks or ("",)]

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def _compile(module: Module, options: Mapping[str, Any]) -> Callable[[], None]:
    original = module.forward
    compiled = torch.compile(original, **options)

    @functools.wraps(original)
    def forward(*args: Any, **named: Any) -> Any:
        return (original if _follows_values() else compiled)(*args, **named)

    return wrap(module, forward)


def _follows_values() -> bool:
    """Whether somebody looks at every operation, as a recording does: there is nothing to be gained from compiling."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
