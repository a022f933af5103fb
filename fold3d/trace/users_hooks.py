"""Hooks that a user has put on modules: they may keep for later, or change, what a module takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import nn

_KNOWN = ("fold3d.", "torch.", "transformers.", "accelerate.", "peft.")
"""Whose hooks are right in a model that is cut: spectral norms, noise on embeddings, gradients of embeddings."""


def is_users(hook: Callable[..., Any], known: tuple[str, ...] = _KNOWN) -> bool:
    """Returns whether the hook's code lies in none of the `known` packages."""
    return not str(getattr(hook, "__module__", "")).startswith(known)


def users_hooks(module: nn.Module, *, backward: bool = True) -> Iterator[Callable[..., Any]]:
    """Yields the user's hooks of this module: those of its forward, and of its backward if asked."""
    stores = [module._forward_pre_hooks, module._forward_hooks]
    if backward:
        stores += [module._backward_pre_hooks, module._backward_hooks]
    yield from filter(is_users, chain.from_iterable(store.values() for store in stores))


def drop_hooks(module: nn.Module, unwanted: Callable[[Callable[..., Any]], bool]) -> None:
    """Takes the unwanted hooks of the forward off the module itself."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if unwanted(hook)]:
            del hooks[number]


def is_ours(hook: Callable[..., Any]) -> bool:
    """Returns whether it is a hook of fold3d's."""
    return str(getattr(hook, "__module__", "")).startswith("fold3d.")
