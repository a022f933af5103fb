"""broadcast_value: a nested value with tensors, from one rank to its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class _TensorHere:
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def broadcast_value(value: Any, source: int, group: Any) -> Any:
    """Returns rank `source`'s `value` on every rank of `group`; all of them call.

    Args:
        value: any nesting that torch.utils._pytree knows, with tensors and picklable values; ignored on other ranks.
        source: global rank.
    """
    is_source = dist.get_rank() == source
    tensors: list[torch.Tensor] = []

    def describe(tensor: torch.Tensor) -> _TensorHere:
        tensors.append(tensor.detach().contiguous())
        return _TensorHere(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    header = [tree_map_only(torch.Tensor, describe, value) if is_source else None]
    dist.broadcast_object_list(header, source, group=group)
    if is_source:
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)
        return value

    def receive(described: _TensorHere) -> torch.Tensor:
        device = torch.device(described.device_type)
        tensor = torch.empty(described.shape, dtype=described.dtype, device=device)
        dist.broadcast(tensor, source, group=group)
        return tensor

    return tree_map_only(_TensorHere, receive, header[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of `tensor` as a flat uint8 tensor: [number of elements * element size]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
