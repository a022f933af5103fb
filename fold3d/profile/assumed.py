"""assumed_profile(): what the layers of a model would cost on a device of a given speed; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.plan.costs import Profile
from fold3d.profile.layers import handed_on
from fold3d.trace import Trace

_FLOAT = 4  # bytes of a gradient: fp32
_UPDATE_SECONDS = 7e-12
"""Of AdamW, per byte of gradients: seven tensors of fp32 pass through memory at 1 TB/s."""
_ADAMW_STATE = 2.0


def assumed_profile(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    *,
    flops_per_second: float,
    recompute: bool = False,
) -> Profile:
    """Returns times by FLOPs (a backward is two forwards) and the bytes that a forward without values keeps.

    Args:
        model: on the meta device, in training mode.
        trace: its recording with `micro_batch`.
        micro_batch: keyword arguments of the model's forward for one micro-batch, on the meta device.
        flops_per_second: that the device sustains.
        recompute: each block's forward runs again in backward; what it keeps is what it was given.
    """
    costs = [trace.prologue_cost, *trace.costs, trace.epilogue_cost]
    forward = [cost.flops / flops_per_second for cost in costs]
    again = [recompute and 0 < layer < len(costs) - 1 for layer in range(len(costs))]
    handed = [handed_on(None, trace, block) for block in range(len(trace.blocks))]
    saved = _saved_bytes(model, trace, micro_batch)
    return Profile(
        forward=tuple(forward),
        backward=tuple((3 if more else 2) * seconds for seconds, more in zip(forward, again, strict=True)),
        saved_bytes=tuple(
            handed[max(0, layer - 2)] if more else size
            for layer, (size, more) in enumerate(zip(saved, again, strict=True))
        ),
        activation_bytes=tuple(handed),
        gradient_bytes={name: _FLOAT * p.numel() if p.requires_grad else 0 for name, p in model.named_parameters()},
        parameter_bytes={name: p.numel() * p.element_size() for name, p in model.named_parameters()},
        update_seconds=_UPDATE_SECONDS,
        optimizer_bytes=_ADAMW_STATE,
        measured=False,
    )


def _saved_bytes(model: nn.Module, trace: Trace, micro_batch: Mapping[str, Any]) -> list[int]:
    """Returns what autograd keeps for the backward of the prologue, each block and the epilogue, parameters aside."""
    kept: list[dict[int, Tensor]] = [{} for _ in range(len(trace.blocks) + 2)]
    parameters = {_storage(parameter) for parameter in model.parameters()}
    layer = 0

    def enters(number: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            nonlocal layer
            layer = number

        return note

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in parameters:
            kept[layer][_storage(tensor)] = tensor
        return tensor

    with ExitStack() as hooks:
        for number, block in enumerate(trace.blocks, 1):
            module = model.get_submodule(block)
            hooks.callback(module.register_forward_pre_hook(enters(number)).remove)
            hooks.callback(module.register_forward_hook(enters(number + 1)).remove)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**micro_batch)
    return [sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()) for tensors in kept]


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
