"""broadcast_value: a nested value with tensors, from one member of a group to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fold3d.comms.tree_group import TreeGroup


@dataclass(frozen=True)
class _TensorHere:
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def broadcast_value(value: Any, source: int, group: TreeGroup) -> Any:
    """Returns member `source`'s `value` to all members of `group`; all of them call.

    Args:
        value: any nesting that torch.utils._pytree knows, with tensors and picklable values; others' are ignored.
    """
    is_source = group.index == source
    tensors: list[torch.Tensor] = []

    def describe(tensor: torch.Tensor) -> _TensorHere:
        # A conjugate or negative view has other bits in memory than its values.
        tensors.append(tensor.detach().resolve_conj().resolve_neg().contiguous())
        return _TensorHere(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    header = group.share(tree_map_only(torch.Tensor, describe, value) if is_source else None, source)
    if is_source:
        for tensor in tensors:
            group.broadcast(tensor, source)
        return value

    def receive(described: _TensorHere) -> torch.Tensor:
        device = torch.device(described.device_type)
        tensor = torch.empty(described.shape, dtype=described.dtype, device=device)
        group.broadcast(tensor, source)
        return tensor

    return tree_map_only(_TensorHere, receive, header)
