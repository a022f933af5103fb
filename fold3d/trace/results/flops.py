"""flops_of(): floating-point operations of one operation."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def flops_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Returns them by the shapes of arguments and result; 0 for operations that are not counted."""
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    if packet is getattr(_aten, "_grouped_mm", None):
        one, other = (tensor.shape for tensor in args[:2])
        return int(2 * prod(one) * other[-1])  # each row meets one of the experts
    return 0
