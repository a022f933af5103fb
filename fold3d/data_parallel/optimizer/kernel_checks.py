"""Whether fold3d's kernels can be taken: they must be built for the device, and do what the optimizer does."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from fold3d import _C
from fold3d.errors import ConfigError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_UNKNOWN = ("amsgrad", "maximize", "differentiable")
"""Settings that change what a step is."""


def check_built(kernels: str, device: torch.device) -> None:
    """Raises ConfigError when fold3d's shall run on a device that they were not built for."""
    if kernels == "fold3d" and not _C.has_kernels(device):
        raise ConfigError(
            f'kernels="fold3d": this build has no kernels for {device.type}, since nvcc was not there when it was '
            'built (`fold3d doctor` says what was); build fold3d again where nvcc is, or set kernels="torch"'
        )


def check_steps(optimizer: Optimizer) -> None:
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
