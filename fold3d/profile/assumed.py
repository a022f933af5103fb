"""assumed_profile(): what the layers of a model would cost on a device of a given speed; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fold3d.placement.bucket_layout import FP32_BYTES
from fold3d.plan.costs import Profile
from fold3d.profile.inside import inside_of
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.profile.layers import handed_on
from fold3d.recompute import NOTHING, Recompute
from fold3d.trace import Trace

_UPDATE_SECONDS = 7e-12
"""Of AdamW, per byte of gradients: seven tensors of fp32 pass through memory at 1 TB/s."""
_HOST_UPDATE_SECONDS = 3.5e-10
"""The same in host memory, of which a process that shares it with others gets 20 GB/s."""
_ADAMW_STATE = 2.0
_ADAMW_WORKSPACE = 3.0
"""The denominator, what it is made of, and that of the parameter before."""


def assumed_profile(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    *,
    flops_per_second: float,
    recompute: Recompute = NOTHING,
) -> Profile:
    """Returns times by FLOPs (a backward is two forwards) and the bytes that a forward without values keeps.

    Args:
        model: on the meta device, in training mode.
        trace: its recording with `micro_batch`.
        micro_batch: keyword arguments of the model's forward for one micro-batch, on the meta device.
        flops_per_second: that the device sustains.
        recompute: what will be computed again; of interest is what it says of modules inside of blocks.
    """
    costs = [trace.prologue_cost, *trace.costs, trace.epilogue_cost]
    forward = [cost.flops / flops_per_second for cost in costs]
    handed = [handed_on({}, trace, block) for block in range(len(trace.blocks))]
    layers = layer_bytes(model, trace, micro_batch)
    return Profile(
        forward=tuple(forward),
        backward=tuple(2 * seconds for seconds in forward),
        layers=layers,
        activation_bytes=tuple(handed),
        gradient_bytes={name: FP32_BYTES * p.numel() if p.requires_grad else 0 for name, p in model.named_parameters()},
        parameter_bytes=trace.parameter_bytes(model),
        update_seconds=_UPDATE_SECONDS,
        host_update_seconds=_HOST_UPDATE_SECONDS,
        optimizer_bytes=_ADAMW_STATE,
        update_bytes=_ADAMW_WORKSPACE,
        updates_together=False,
        measured=False,
        inside=inside_of(model, trace, micro_batch, recompute, forward),
    )
