"""Activation checkpointing around each block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


def _cache_types() -> tuple[type, ...]:
    if "transformers" not in sys.modules:  # a model of it would have imported it
        return ()
    from transformers.cache_utils import Cache

    return (Cache,)
