"""update_cost(): what an optimizer's update takes on a device and on the host, and what memory it needs, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

from fold3d import _C
from fold3d.device import is_accelerator
from fold3d.placement.bucket_layout import FP32_BYTES

_SAMPLE = (256, 256)  # floats; a matrix, since some optimizers take nothing else
_GROWING = ((64, 64), _SAMPLE, (1024, 1024))
"""For the last one what a call costs, whatever the size, does not count."""
_LONGEST_S = 1.0
"""Of a step; an optimizer that multiplies matrices (Muon) may need half a minute for the last one."""
_RUNS = 3
_SEVERAL = 4
"""Parameters: stepped at once, they need as many times the memory of one; one after the other, hardly more."""

Make = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCost:
    """Of an update, each per byte of gradients."""

    seconds: float
    host_seconds: float
    """In host memory."""
    state: float
    """Bytes that stay."""
    workspace: float
    """Bytes beside it, of what is stepped at once."""
    together: bool
    """Whether a call steps all its parameters at once; else one after the other."""


def update_cost(make: Make, device: torch.device) -> UpdateCost:
    """Returns what an update costs on `device`. Any rank may call it alone.

    Args:
        make: makes the optimizer of a list of parameters; tried on made-up ones.
    Raises: whatever the optimizer raises.
    """
    seconds, state = _timed(make, device)
    one, several = (_workspace(make, device, count) for count in (1, _SEVERAL))
    together = several > 0.6 * _SEVERAL * one
    return UpdateCost(
        seconds=seconds,
        host_seconds=seconds if device.type == "cpu" else _host_seconds(make, seconds),
        state=state,
        workspace=several / _SEVERAL if together else several,
        together=together,
    )


def has_fused_step(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Returns whether torch has a fused step on the host for an optimizer of this class, found out by one."""
    if type(optimizer).__module__.partition(".")[0] != "torch" or "fused" not in optimizer.defaults:
        return False
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        type(optimizer)([parameter], lr=0.1, fused=True).step()  # type: ignore[call-arg]
    except Exception:  # whatever a constructor or a step says to a device or dtype
        return False
    return True


def _host_seconds(make: Make, otherwise: float) -> float:
    """Returns the seconds of an update on the host; of an optimizer that cannot be stepped there, those elsewhere."""
    cpu = torch.device("cpu")
    try:
        optimizer = make([_parameter(cpu)])
        if not has_fused_step(optimizer, torch.float32):
            return _timed(make, cpu)[0]
        return _timed(lambda parameters: type(optimizer)(parameters, lr=1e-3, fused=True), cpu)[0]  # type: ignore[call-arg]
    except Exception:  # which is said where it is asked for
        return otherwise


def _parameter(device: torch.device, shape: tuple[int, int] = _SAMPLE) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape, device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _timed(make: Make, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of an update and the bytes of its state, each per byte of gradients."""
    fastest: list[float] = []
    for shape in _GROWING:
        parameter = _parameter(device, shape)
        optimizer = make([parameter])
        times = []
        for _ in range(_RUNS + 1):
            begin = time.perf_counter()
            optimizer.step()
            float(parameter.detach()[0, 0])  # waits for the device
            times.append(time.perf_counter() - begin)
        fastest.append(min(times[1:]))
        if len(fastest) > 1 and fastest[-1] ** 2 / fastest[-2] > _LONGEST_S:  # as the next one's, if it grows like this
            break
    tensors = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
    size = FP32_BYTES * parameter.numel()
    return median(times[1:]) / size, sum(t.numel() * t.element_size() for t in tensors) / size


def _workspace(make: Make, device: torch.device, count: int) -> float:
    """Returns the most bytes at any moment of an update of so many parameters, per byte of gradients of one."""
    parameters = [_parameter(device) for _ in range(count)]
    optimizer = make(parameters)
    optimizer.step()  # makes the state
    size = FP32_BYTES * parameters[0].numel()
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        optimizer.step()
        return (torch.accelerator.max_memory_allocated(device) - before) / size
    counted_before = _C.is_counted(torch.empty(1))
    if not _C.count_cpu_bytes(True):  # another allocator, which nobody can ask
        return 0.0
    try:
        before = _C.live_cpu_bytes()
        _C.reset_peak_cpu_bytes()
        optimizer.step()
        return (_C.peak_cpu_bytes() - before) / size
    finally:
        _C.count_cpu_bytes(counted_before)
