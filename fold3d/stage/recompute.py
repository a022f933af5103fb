"""Activation checkpointing: our own around each block, and what to know about the user's around ours."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame, checkpoint


def recomputed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `forward` of `module` such that its activations are recomputed in backward instead of kept.

    Without effect where there is nothing to keep (evaluation, no_grad) and where the block checkpoints itself
    (transformers' gradient checkpointing). A key-value cache is not handed on, because recomputing would fill
    it twice.
    """
    cache_types = _cache_types()

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()) or getattr(module, "gradient_checkpointing", False):
            return forward(*args, **kwargs)
        if cache_types:
            args = tuple(None if isinstance(arg, cache_types) else arg for arg in args)
            kwargs = {name: None if isinstance(arg, cache_types) else arg for name, arg in kwargs.items()}
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    return checkpointed


def frame_of_checkpoint() -> object | None:
    """Returns the frame of the non-reentrant torch.utils.checkpoint in which the caller runs, None outside of
    one.

    It is the same object in the forward of the checkpointed code and when backward runs that code again.
    torch has no public way to ask for it; the frame is in the closure of the hook that the checkpoint
    installs.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        content = cell.cell_contents
        if isinstance(content, weakref.ref):
            content = content()
        if isinstance(content, _CheckpointFrame):
            return content
    return None


def group_of_checkpoint() -> object:
    """Returns an object that is the same throughout the innermost saved-tensor hooks (such as a checkpoint);
    None outside."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def in_reentrant_checkpoint() -> bool:
    """Returns whether the caller runs inside the forward of a reentrant torch.utils.checkpoint. Slow: walks
    the stack."""
    code = CheckpointFunction.forward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _cache_types() -> tuple[type, ...]:
    if "transformers" not in sys.modules:  # a model of it would have imported it
        return ()
    from transformers.cache_utils import Cache

    return (Cache,)
