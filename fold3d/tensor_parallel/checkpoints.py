"""What to know about an activation checkpoint of torch's, or of the user's code, from the code inside of it."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame


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
    return CheckpointFunction in _functions_around()


def function_around() -> str:
    """Returns which torch.autograd.Function the caller runs in the forward of, why that cannot be cut, and what to do
    instead; "" outside of one. Slow, as `in_reentrant_checkpoint`."""
    for function in _functions_around():
        if function is CheckpointFunction:
            return (
                "a reentrant torch.utils.checkpoint, through which no gradient reaches another chunk. Pass "
                "use_reentrant=False to checkpoint, or switch it off and set recompute=True."
            )
        return (
            f"the forward of a torch.autograd.Function ({function.__name__}), whose backward computes gradients in its "
            "own way, so that none reaches another chunk. Such a model trains in one piece: pp=1, segments=1."
        )
    return ""


def _functions_around() -> Iterator[type]:
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["cls"]
        frame = frame.f_back
