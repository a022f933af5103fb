"""Arguments: how the model is called; forms of calls; calls of blocks without key-value caches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fold3d.errors import TraceError


class Arguments(dict[str, Any]):
    """Keyword arguments of a forward.

    Attributes:
        module: names the module that was called: "" is the model itself.
        only_loss: whether who called reads nothing but the loss of what is returned (see `loss_in`).
    """

    module: str = ""
    only_loss: bool = False

    @classmethod
    def of(cls, module: str, kwargs: Mapping[str, Any]) -> Arguments:
        """Returns the keyword arguments of a call of `module`."""
        made = cls(kwargs)
        made.module = module
        return made

    def reading(self, only_loss: bool) -> Arguments:
        """Returns the same arguments, of a caller who reads nothing but the loss, or all."""
        made = Arguments.of(self.module, self)
        made.only_loss = only_loss
        return made

    def called(self, model: nn.Module) -> nn.Module:
        """Returns the module of `model`, or of a copy of it, whose forward takes the arguments."""
        return model.get_submodule(self.module)


def with_values(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `values` as arguments of the same call."""
    if not isinstance(arguments, Arguments):
        return values
    return Arguments.of(arguments.module, values).reading(arguments.only_loss)


def ancestors(blocks: Iterable[str]) -> list[str]:
    """Returns the names of the modules that the blocks lie in, the model itself ("") first."""
    found = {""}
    for block in blocks:
        found.update(block[:i] for i, letter in enumerate(block) if letter == ".")
    return sorted(found)


def by_name(model: nn.Module, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments of a call of module `module`, each by its name.

    Raises: TraceError for arguments that the forward does not take, or that have no name.
    """
    called = model.get_submodule(module)
    found = Arguments.of(module, kwargs)
    if not args:
        return found
    forward = inspect.signature(called.forward)
    try:
        bound = forward.bind_partial(*args)
    except TypeError as error:
        raise TraceError(f"{type(called).__name__} is called with wrong arguments: {error}") from error
    for name, value in bound.arguments.items():
        if forward.parameters[name].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise TraceError(f"{type(called).__name__} is called with arguments that have no name (*{name})")
        found[name] = value
    return found


Form = tuple[Any, ...]
"""What calls of the model must have in common to run the same code: names and kinds of arguments, not their sizes."""


_SIZES = ("num_items_in_batch", "max_length_q", "max_length_k")
"""Numbers that are others in every batch, and decide about no code: labels, and the longest of packed sequences."""


def form_of(arguments: Mapping[str, Any]) -> Form:
    """Returns the form of a call: what is no number of any size counts by its value, a tensor by its kind."""
    named = {name: None if name in _SIZES else arguments[name] for name in sorted(arguments)}
    leaves, spec = tree_flatten(named)
    counts = "num_items_in_batch" in arguments
    called = getattr(arguments, "module", ""), getattr(arguments, "only_loss", False)
    return (*called, counts, str(spec), *(_kind(leaf) for leaf in leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.ndim, leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, (bool, int, str)) else type(leaf)


def loss_in(result: Any) -> Tensor | None:
    """Returns the loss in what a model returned, where transformers' Trainer looks for it; None where there is none."""
    if isinstance(result, Mapping):
        found = result.get("loss")
    else:
        found = result[0] if isinstance(result, tuple) and result else None
    return found if isinstance(found, Tensor) and found.ndim == 0 else None


def describe(arguments: Mapping[str, Any]) -> str:
    """Returns the call in words, e.g. "model(input_ids=..., output_hidden_states=True)"."""
    named = [f"{k}={v!r}" if isinstance(v, (bool, int, str)) else f"{k}=..." for k, v in arguments.items()]
    return f"{getattr(arguments, 'module', '') or 'model'}({', '.join(named)})"


def without_key_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a module's arguments with None in the place of each of transformers' caches.

    In training nobody reads them: keys and values of all tokens are computed in the same call. But for those of a
    prefix, see `cached_tokens`.
    """
    types = _cache_types()
    if not types:
        return args, dict(kwargs)
    positional = tuple(None if isinstance(one, types) else one for one in args)
    return positional, {name: None if isinstance(one, types) else one for name, one in kwargs.items()}


def cached_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns for how many tokens a cache among a module's arguments has keys already, in the module's own layer."""
    types = _cache_types()
    caches: list[Any] = [one for one in (*args, *kwargs.values()) if isinstance(one, types)] if types else []
    layers = {getattr(one, "layer_idx", None) for one in module.modules()} if caches else set()
    numbers = [number for number in layers if isinstance(number, int)]
    return max((int(cache.get_seq_length(number)) for cache in caches for number in numbers), default=0)


def caches_in(value: Any) -> list[Any]:
    """Returns `value`, if it is one of transformers' caches, and those that it holds."""
    types = _cache_types()
    if not types or not isinstance(value, types):
        return []
    return [value, *(one for one in vars(value).values() if isinstance(one, types))]


def _cache_types() -> tuple[type, ...]:
    if "transformers" not in sys.modules:  # a model of it would have imported it
        return ()
    from transformers.cache_utils import Cache

    return (Cache,)
