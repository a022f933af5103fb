"""without_key_values(): a block that runs once more, or for another one, must not add to a key-value cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


def without_key_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a module's arguments with None in the place of each of transformers' caches.

    In training nobody reads them: keys and values of all tokens are computed in the same call. But for those of a
    prefix, see `cached_tokens`.
    """
    types = _types()
    if not types:
        return args, dict(kwargs)
    positional = tuple(None if isinstance(one, types) else one for one in args)
    return positional, {name: None if isinstance(one, types) else one for name, one in kwargs.items()}


def cached_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns for how many tokens a cache among a module's arguments has keys already, in the module's own layer."""
    types = _types()
    caches: list[Any] = [one for one in (*args, *kwargs.values()) if isinstance(one, types)] if types else []
    layers = {getattr(one, "layer_idx", None) for one in module.modules()} if caches else set()
    numbers = [number for number in layers if isinstance(number, int)]
    return max((int(cache.get_seq_length(number)) for cache in caches for number in numbers), default=0)


def _types() -> tuple[type, ...]:
    if "transformers" not in sys.modules:  # a model of it would have imported it
        return ()
    from transformers.cache_utils import Cache

    return (Cache,)
