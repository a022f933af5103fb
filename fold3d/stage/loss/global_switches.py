"""GlobalSwitches: settings of torch for the whole process, which code enters with context managers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.backends import cuda

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_SWITCHES: tuple[_Switch, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _deterministic,
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.autograd.set_detect_anomaly(*state),
    ),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)


class GlobalSwitches:
    """Which attention kernels, dtypes and ways to compute torch uses in this process, as they are now."""

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SWITCHES]

    def restore(self) -> None:
        """Makes them what they were."""
        for (get, set_to), value in zip(_SWITCHES, self._values, strict=True):
            if get() != value:
                set_to(value)
