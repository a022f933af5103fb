"""Whether fold3d's kernels can be taken, and a step of AdamW by them: clipping and update in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d import _C
from fold3d.errors import ConfigError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_UNKNOWN = ("amsgrad", "maximize", "differentiable")
"""Settings that change what a step is."""


def check_kernels(kernels: str, device: torch.device) -> None:
    """Raises ConfigError when fold3d's shall run on a device that they were not built for."""
    if kernels == "fold3d" and not _C.has_kernels(device):
        raise ConfigError(
            f'kernels="fold3d": this build has no kernels for {device.type}, since nvcc was not there when it was '
            'built (`fold3d doctor` says what was); build fold3d again where nvcc is, or set kernels="torch"'
        )


def check_kernel(optimizer: Optimizer) -> None:
    """Raises ConfigError unless the kernel does what `optimizer` does."""
    instead = 'use torch.optim.AdamW, or set kernels="torch"'
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise ConfigError(f'kernels="fold3d" steps AdamW, and the optimizer is {name}; {instead}')
    for group in optimizer.param_groups:
        for key in _UNKNOWN:
            if group.get(key):
                raise ConfigError(f'kernels="fold3d" has no AdamW with {key}={group[key]!r}; {instead}')
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ConfigError(
                f'kernels="fold3d" decays weights as AdamW does, and {name} with '
                f"weight_decay={group['weight_decay']} adds the decay to gradients; {instead}"
            )
        for parameter in group["params"]:
            if parameter.dtype not in _DTYPES:
                raise ConfigError(
                    f'kernels="fold3d" steps parameters of float32, float64 and bfloat16, not {parameter.dtype}; '
                    'set kernels="torch"'
                )


@torch.no_grad()
def step_by_kernel(twin: Optimizer, gradients: Mapping[Tensor, Tensor], scale: float) -> None:
    """Does what `twin.step()` does with these gradients times `scale`, in fp32 (fp64 of fp64 weights).

    Where weights are bfloat16 that rounds less often than torch does: fp32 gradients are not rounded before.

    Args:
        gradients: parameter -> gradient, of its shape; parameters without one are skipped. They stay as they are.
    """
    factor = torch.tensor(scale, dtype=torch.float64)
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
