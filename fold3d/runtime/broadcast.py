"""broadcast_value: a nested value with tensors, from one rank to its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten


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
    rank = dist.get_rank()
    header: list[Any] = [None]
    tensors: list[torch.Tensor] = []
    if rank == source:
        leaves, spec = tree_flatten(value)
        tensors = [leaf.detach().contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        described = [
            _TensorHere(tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        header = [(described, spec)]
    dist.broadcast_object_list(header, source, group=group)
    if rank == source:
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)
        return value
    described, spec = header[0]
    leaves = []
    for leaf in described:
        if isinstance(leaf, _TensorHere):
            device = torch.device(leaf.device_type, torch.cuda.current_device()) if leaf.device_type == "cuda" else "cpu"
            leaf = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            dist.broadcast(leaf, source, group=group)
        leaves.append(leaf)
    return tree_unflatten(leaves, spec)
