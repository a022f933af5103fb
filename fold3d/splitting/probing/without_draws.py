"""WithoutDraws: code computes as in training, but nothing by chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.feature_dropout}
)
_INSTEAD: Mapping[Any, float] = {
    torch.rand: 0.5, torch.rand_like: 0.5, Tensor.uniform_: 0.5, torch.randn: 0.0, torch.randn_like: 0.0,
    Tensor.normal_: 0.0, torch.bernoulli: 1.0, Tensor.bernoulli_: 1.0,
}  # fmt: skip
"""Random functions -> a number that they might draw."""
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class WithoutDraws(TorchFunctionMode):
    """While it is entered, dropout drops nothing, and other random functions return one number everywhere."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention:
            named = {**dict(zip(_ATTENTION, args, strict=False)), **named, "dropout_p": 0.0}
            return func(**named)
        if func not in _INSTEAD:
            return func(*args, **named)
        state = torch.get_rng_state()
        drawn = func(*args, **named)
        torch.set_rng_state(state)
        with torch.no_grad():
            return drawn.fill_(_INSTEAD[func])
