"""check_separable(): whether a user's optimizer may be stepped one tensor, or one part of a tensor, at a time;
compare_settings(): replicas, which keep copies of the same weights, must step them alike; check_built(), check_steps():
whether fold3d's kernels are built for the device, and do what the optimizer does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d import _C
from fold3d.comms.consistency import compare
from fold3d.comms.world_group import WorldGroup
from fold3d.data_parallel.optimizer.bucket_optimizer import twin_of
from fold3d.data_parallel.optimizer.host_memory import settings_on_host
from fold3d.device import rng_untouched
from fold3d.errors import ConfigError

_SAMPLE = (96, 100)
"""Some optimizers treat only tensors of 4,096 elements and more in blocks: each half has as many."""
_STEPS = 3
"""Enough for optimizers that estimate a step size from how far all parameters have come, which shows in the second."""
_CUT = 4611
"""Where the sample is cut: not at a row, so that whatever looks at rows, columns or norms shows."""


def check_separable(optimizer: Optimizer, *, parts: bool, tp: int = 1, on_host: bool = False) -> int:
    """Raises ConfigError unless the optimizer steps each tensor by itself, and if `parts`, or with tensor parallelism
    (`tp` ranks hold a part of each tensor), each element.

    Args:
        on_host: it is stepped in host memory, piece by piece, wherever its parameters are; tried there.
    Returns: bytes of the state of each element of a parameter, at most.

    Found out by trying, with the settings of each group, on the device and in the dtype of its parameters, in the mode
    for training: a few steps on two small matrices together must give the same numbers as on each alone, or on the
    halves of each, in the matrices and in what the optimizer keeps in its groups; which must be the same in steps
    without gradients.
    """
    name = type(optimizer).__name__
    first = next((p for group in optimizer.param_groups for p in group["params"]), torch.empty(0))
    if on_host and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"offload_optimizer=True keeps the optimizer's state in host memory, but {name} computes the weights for "
            "evaluation from it; set offload_optimizer=False"
        )
    tried_on = first
    if on_host and first.device.type != "cpu":
        tried_on = torch.empty(0, dtype=first.dtype)
    with rng_untouched(first.device):
        return _check_separable(
            optimizer, name, functools.partial(_samples, tried_on), parts=parts, tp=tp, on_host=on_host
        )


def _check_separable(
    optimizer: Optimizer, name: str, draw: Callable[[], list[_Sample]], *, parts: bool, tp: int, on_host: bool
) -> int:
    why, instead = (f"tp={tp}", "set tp=1") if tp > 1 else ('dp_sync="zero1"', 'set dp_sync="early"')
    _refuse_attributes(optimizer, name, on_host=on_host)
    state_bytes = 0
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        if on_host and group["params"] and group["params"][0].device.type != "cpu":
            settings = settings_on_host(settings, fused=False)
        if "lr" in settings:
            settings["lr"] = 0.1  # a schedule may begin at zero, where nothing shows
        try:
            together = _tried(optimizer, settings, [draw()])
            unmoved, (idle,), kept = _tried(optimizer, settings, [draw()], gradients=False)
        except Exception as error:
            if on_host:
                raise ConfigError(
                    f"offload_optimizer=True steps the optimizer in host memory, layer by layer, which {name} cannot "
                    f"do ({type(error).__name__}: {error}); use another optimizer, or set offload_optimizer=False"
                ) from error
            raise ConfigError(
                f"{name} cannot be stepped layer by layer, as several stages or replicas need it "
                f"({type(error).__name__}: {error}); use another optimizer"
            ) from error
        state_bytes = max(state_bytes, together[2])
        if not _same(together, _tried(optimizer, settings, [[sample] for sample in draw()])):
            if on_host:
                raise ConfigError(
                    f"{name} gives other numbers for parameters together than for each alone, but with "
                    "offload_optimizer=True layers are stepped apart; use an optimizer that treats parameters "
                    "independently, or set offload_optimizer=False"
                )
            raise ConfigError(
                f"{name} gives other numbers for parameters together than for each alone, but with several stages or "
                "replicas layers are stepped apart; use an optimizer that treats parameters independently"
            )
        if kept or not torch.equal(unmoved, torch.cat([sample[0].flatten() for sample in draw()])):
            raise ConfigError(
                f"{name} changes parameters, or keeps something of them, also in a step in which they have no "
                "gradients, and it is stepped layer by layer here, besides a step of its own without gradients: leave "
                "out parameters whose .grad is None, as torch's optimizers do"
            )
        (common,) = together[1]
        if counted := [key for key in common if not math.isclose(common[key], idle.get(key, math.nan), rel_tol=1e-4)]:
            raise ConfigError(
                f"{name} changes {counted[0]!r} in its parameter groups only in a step with gradients, and it is "
                "stepped layer by layer here, so its own groups never see any: count in the state of each parameter, "
                "or in every step; or train with one process, without offload_optimizer"
            )
        if not parts and tp == 1:
            continue
        if parts and callable(getattr(optimizer, "eval", None)):
            raise ConfigError(
                f'dp_sync="zero1" divides the optimizer\'s state, but {name} computes the weights for evaluation from '
                'all of it; set dp_sync="early"'
            )
        halves = [[part] for sample in draw() for part in _cut(sample)]
        try:
            cut = _tried(optimizer, settings, halves)
        except Exception as error:
            raise ConfigError(
                f"{why} steps parts of parameters, which {name} cannot do ({type(error).__name__}: {error}); {instead}"
            ) from error
        if not _same(together, cut):
            raise ConfigError(
                f"{why} steps parts of parameters, but {name} gives other numbers for a part than for the whole: it "
                f"does not work element by element; {instead}"
            )
    return state_bytes


def _refuse_attributes(optimizer: Optimizer, name: str, *, on_host: bool) -> None:
    held = next(
        (name for name, one in vars(optimizer).items() if any(isinstance(o, Optimizer) for o in _each(one))), ""
    )
    if held:
        where = "offload_optimizer=True" if on_host else "training in several processes, or with gradient_delay=1,"
        raise ConfigError(
            f"{where} steps layers, or parts of them, apart, but {name} has another optimizer do it ({held!r}), which "
            f"steps all: {'set offload_optimizer=False' if on_host else 'use an optimizer that steps by itself'}, or "
            "train in one process"
        )
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for attribute, one in vars(optimizer).items():
        if attribute != "param_groups" and any(id(value) in stepped for value in _each(one)):
            raise ConfigError(
                f"{name} keeps parameters in {attribute!r}, besides its groups, and would step these where layers, or "
                "parts of them, are stepped apart: use an optimizer whose step goes through its parameter groups"
            )


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


_Sample = tuple[Tensor, ...]
"""A tensor and its gradients of some steps."""
_Outcome = tuple[Tensor, list[dict[str, float]], int]
"""All elements, the numbers that each twin has in its group, and the bytes of state for each element."""


def _samples(like: Tensor) -> list[_Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(2):
        start, slope = (torch.randn(_SAMPLE, generator=generator) for _ in range(2))
        # About the same way in each step, so that who estimates how far it is sees parameters come along.
        steps = [slope + 0.3 * torch.randn(_SAMPLE, generator=generator) for _ in range(_STEPS)]
        samples.append(tuple(one.to(device=like.device, dtype=like.dtype) for one in (start, *steps)))
    return samples


def _cut(sample: _Sample) -> list[_Sample]:
    flat = [tensor.flatten() for tensor in sample]
    return [tuple(tensor[:_CUT].clone() for tensor in flat), tuple(tensor[_CUT:].clone() for tensor in flat)]


def _tried(
    optimizer: Optimizer, settings: Mapping[str, Any], twins: Sequence[Sequence[_Sample]], *, gradients: bool = True
) -> _Outcome:
    """Returns what some steps lead to, in order, when each entry of `twins` is stepped by a twin of its own; without
    `gradients` no parameter has one."""
    numbers: list[dict[str, float]] = []
    kept = 0
    for samples in twins:
        twin = twin_of(optimizer, [{**settings, "params": [sample[0] for sample in samples]}])
        for_training = getattr(twin, "train", None)
        if callable(for_training):  # of those that keep other weights for evaluation
            for_training()
        for step in range(1, 1 + _STEPS):
            for sample in samples:
                sample[0].grad = sample[step].clone() if gradients else None
            twin.step()
        values = [value for state in twin.state.values() for value in state.values() if isinstance(value, Tensor)]
        kept += sum(value.nbytes for value in values)
        group = twin.param_groups[0].items()
        numbers.append({key: float(value) for key, value in group if _is_number(value)})
    elements = torch.cat([sample[0].flatten() for samples in twins for sample in samples])
    return elements, numbers, -(-kept // elements.numel())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _same(together: _Outcome, apart: _Outcome) -> bool:
    """Whether the elements agree, and what twins count or estimate for all of their parameters."""
    (first, (common,), _), (second, numbers, _) = together, apart
    rough = first.dtype in (torch.float16, torch.bfloat16)
    alike = torch.allclose(first, second, rtol=1e-2 if rough else 1e-5, atol=1e-2 if rough else 1e-7)
    return alike and all(
        own.keys() == common.keys() and all(math.isclose(own[key], common[key], rel_tol=1e-4) for key in own)
        for own in numbers
    )


def compare_settings(optimizer: Optimizer, world: WorldGroup) -> None:
    """All ranks of the job call, each with its optimizer. Stages may have their own settings.

    Raises: ConfigError on every rank when replicas of a stage have different ones.
    """
    settings = {
        f"{name} of optimizer group {number}": repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (Number, str, tuple)) or value is None
    }
    compare(world, {}, {"optimizer": type(optimizer).__qualname__} | settings)


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
