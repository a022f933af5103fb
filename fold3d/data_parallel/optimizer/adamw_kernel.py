"""A step of AdamW by fold3d's kernel: clipping and update in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.data_parallel.gradients import Factor


@torch.no_grad()
def step_by_kernel(twin: Optimizer, gradients: Mapping[Tensor, Tensor], scale: Factor) -> None:
    """Does what `twin.step()` does with these gradients times `scale`, in fp32 (fp64 of fp64 weights).

    Where weights are bfloat16 that rounds less often than torch does: fp32 gradients are not rounded before.

    Args:
        twin: one that `kernel_checks.check_steps` lets pass.
        gradients: parameter -> gradient, of its shape; parameters without one are skipped. They stay as they are.
    """
    factor = scale.to(torch.float64) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
    for group in twin.param_groups:
        alike: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
        for weight in group["params"]:
            gradient = gradients.get(weight)
            if gradient is None:
                continue
            state = _state_of(twin, weight, group)
            state["step"] += 1
            arrays = (weight, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"])
            alike.setdefault(tuple(one.dtype for one in arrays[:3]), []).append(arrays)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        for members in alike.values():
            weights, given, means, squares, steps = (list(column) for column in zip(*members, strict=True))
            torch.ops.fold3d.adamw_(
                weights,
                _laid_out(given, weights),
                _kept(means, weights),
                _kept(squares, weights),
                steps,
                [],
                factor,
                float(group["lr"]),
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
            )


def _state_of(twin: Optimizer, weight: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameter's state, begun as torch begins it."""
    state: dict[str, Any] = twin.state[weight]
    if not state:
        on_device = group.get("fused") or group.get("capturable")
        kind = torch.float64 if torch.get_default_dtype() == torch.float64 and not on_device else torch.float32
        state["step"] = torch.zeros((), dtype=kind, device=weight.device if on_device else "cpu")
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state


def _laid_out(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors as they are, or copies of those that lie otherwise than their weights."""
    return [
        one if one.stride() == weight.stride() else torch.empty_like(weight, dtype=one.dtype).copy_(one)
        for one, weight in zip(tensors, weights, strict=True)
    ]


def _kept(moments: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the moments, whose memory is made to lie as their weights' does."""
    for moment, weight in zip(moments, weights, strict=True):
        if moment.stride() != weight.stride():
            moment.data = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)
    return list(moments)
