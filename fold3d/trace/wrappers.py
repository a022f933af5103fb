"""What is on modules and parameters: hooks of the user's and of others, shapes of which a parameter holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_KNOWN = ("fold3d.", "torch.", "transformers.", "accelerate.", "peft.", "contextlib")
"""Whose hooks are right in a model that is cut: spectral norms, noise on embeddings, gradients of embeddings; what a
pickled model has in the place of those of fold3d (`coat.Hook`)."""


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


_WHOLE_SHAPE = "_fold3d_whole_shape"


def set_whole_shape(parameter: Tensor, shape: Sequence[int]) -> None:
    """Notes on a parameter that holds a part what shape the whole one has; the parameter keeps it."""
    vars(parameter)[_WHOLE_SHAPE] = torch.Size(shape)


def whole_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of the whole parameter of which `tensor` holds a part; its own where it is no part."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.shape
    found: torch.Size = vars(tensor).get(_WHOLE_SHAPE, tensor.shape)
    return found
