"""WholeAttention: attention on tensors without values as one operation, not as the dozen that torch divides it into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_attention = torch.nn.functional.scaled_dot_product_attention
_fused = torch.ops.aten._scaled_dot_product_efficient_attention


class WholeAttention(TorchFunctionMode):
    """What is read and made, and the number of FLOPs, are the same. Divided, every block would take several times as
    long, and make a mask of the sequence's length squared."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returns."""
        kwargs = kwargs or {}
        if func is _attention:
            made = _whole(*args, **kwargs)
            if made is not None:
                return made
        return func(*args, **kwargs)


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Returns the result of attention; None where it is not of the usual form, of which torch shall judge."""
    shapes = query.shape, key.shape, value.shape
    heads = query.shape[1:2] == key.shape[1:2] or enable_gqa
    if any(len(one) != 4 or one[0] != query.shape[0] for one in shapes) or (is_causal and attn_mask is not None):
        return None
    if not heads or key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        return None
    made: Tensor = _fused(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    return made.contiguous() if dropout_p else made  # as it lies where kernels draw no dropout, which most do not
