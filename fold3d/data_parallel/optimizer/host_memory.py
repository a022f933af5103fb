"""Host memory that stands beside a device: where the optimizer's state lies with `offload_optimizer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fold3d import _C


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Tensors that its body makes on the CPU are the host's. Where the CPU is the device, these do not count as what is
    on it (csrc/runtime/memory); else nothing changes."""
    before = _C.allocate_as_host(True)
    try:
        yield
    finally:
        _C.allocate_as_host(before)


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor of a state that is being loaded: torch's optimizers would bring it to the parameter's device."""

    value: Tensor


def to_host(value: Any) -> Any:
    """Returns a value of the optimizer's state as it lies in host memory: a copy, laid out alike, of a tensor that does
    not lie there yet."""
    value = unwrapped(value)
    if not isinstance(value, Tensor) or (value.device.type == "cpu" and not _C.is_counted(value)):
        return value
    with host_memory():
        return torch.empty_like(value, device="cpu").copy_(value)


def unwrapped(value: Any) -> Any:
    """Returns the tensor that is on the host, anything else as it is."""
    return value.value if isinstance(value, OnHost) else value


def settings_on_host(group: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    """Returns what an optimizer's group of parameters on another device says of a step on the host.

    Args:
        fused: whether the optimizer has kernels that do all of a step at once on the host, taken unless the group says
            otherwise: they are several times faster there.
    """
    kept = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
    if kept.get("capturable"):
        kept["capturable"] = False
    if fused and kept.get("fused", False) is None and not kept.get("foreach"):
        kept["fused"] = True
    return kept
