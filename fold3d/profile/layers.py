"""profile_model(): what each layer of a model costs on this machine, measured before the model is cut;
assumed_profile(): what it would cost on a device of a given speed, without running anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fold3d.placement.bucket_layout import FP32_BYTES
from fold3d.plan.costs import Inside, LayerBytes, Profile, estimated
from fold3d.profile.calls import ModuleCall, TensorShape, Timing, record_calls, time_call
from fold3d.profile.layer_bytes import inside_of, layer_bytes
from fold3d.profile.optimizer import UpdateCost, update_cost
from fold3d.recompute import NOTHING, Recompute
from fold3d.trace import BlockCost, Trace
from fold3d.trace.module_results import Value

_log = logging.getLogger(__name__)

_FALLBACK_SIZE = 256  # of the matrices whose product tells the speed when no block can be run alone


def profile_model(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    device: torch.device,
    *,
    recompute: Recompute = NOTHING,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    seconds: float = 2.0,
) -> Profile:
    """Returns what the layers of `model` cost on `device`. Any rank may call it alone; no process group is used.

    Of each kind of layer (class, shapes of parameters and arguments) one is copied to the device and run a few times;
    layers that cannot be run alone get their share by FLOPs. Neither the model nor random numbers are touched.

    Args:
        model: before it is cut; parameters may be on the meta device.
        trace: its recording.
        micro_batch: keyword arguments of the model's forward for one micro-batch; only shapes matter.
        recompute: what will be computed again; of interest is what it says of modules inside of blocks.
        optimizer: makes the optimizer of a list of parameters, tried on a made-up one; where that fails, and for None,
            AdamW stands for it.
        autocast: the context in which the model's forward runs.
        prepare: as for `layer_bytes`.
        seconds: about how long to measure, all kinds together.
    """
    _log.info("measuring %d blocks for about %.1f s", len(trace.blocks), seconds)
    names = [*trace.prologue, *trace.blocks, *trace.epilogue]
    try:
        carried = [value.module for border in trace.crossings for one in border for value in one.values]
        calls = record_calls(model, [*names, *carried], micro_batch, autocast)
    except Exception as error:  # whatever a model raises on tensors without values
        _log.warning("the model's parts cannot be measured (%s: %s); FLOPs decide", type(error).__name__, error)
        calls = {}
    kinds = {name: _kind(model.get_submodule(name), calls[name]) for name in dict.fromkeys(names) if name in calls}
    timings: dict[str, Timing | None] = {}
    share = seconds / max(1, len(set(kinds.values())))
    for name, kind in kinds.items():
        if kind not in timings:
            timings[kind] = _time(model, name, calls[name], device, share, autocast)
    entries: list[tuple[Sequence[str], BlockCost]] = [
        (trace.prologue, trace.prologue_cost),
        *(((block,), cost) for block, cost in zip(trace.blocks, trace.costs, strict=True)),
        (trace.epilogue, trace.epilogue_cost),
    ]
    layers = [_sum([timings[kinds[name]] if name in kinds else None for name in parts]) for parts, _ in entries]
    flops = [cost.flops for _, cost in entries]
    complete = _fill(layers, flops, device)
    handed = [handed_on(calls, trace, block) for block in range(len(trace.blocks))]
    forward = [layer.forward for layer in complete]
    how: dict[str, Any] = {"device": device, "autocast": autocast, "prepare": prepare}
    update = _optimizer_cost(optimizer, device)
    return Profile(
        forward=tuple(forward),
        backward=tuple(layer.backward for layer in complete),
        layers=_bytes(lambda: layer_bytes(model, trace, micro_batch, **how), complete, handed),
        activation_bytes=tuple(handed),
        gradient_bytes={name: FP32_BYTES * p.numel() if p.requires_grad else 0 for name, p in model.named_parameters()},
        parameter_bytes=trace.parameter_bytes(model),
        update_seconds=update.seconds,
        host_update_seconds=update.host_seconds,
        optimizer_bytes=update.state,
        update_bytes=update.workspace,
        updates_together=update.together,
        measured=any(timing is not None for timing in timings.values()),
        inside=_inside(lambda: inside_of(model, trace, micro_batch, recompute, forward, **how)),
        busy=_busy(complete),
    )


def _inside(count: Callable[[], tuple[Inside, ...]]) -> tuple[Inside, ...]:
    """Returns what `inside_of` says; nothing where the whole model cannot run without values."""
    try:
        return count()
    except Exception as error:  # whatever a model raises on tensors without values
        _log.info("what modules inside of blocks recompute is not planned with (%s: %s)", type(error).__name__, error)
        return ()


def _bytes(
    count: Callable[[], tuple[LayerBytes, ...]], timings: Sequence[Timing], handed: Sequence[int]
) -> tuple[LayerBytes, ...]:
    """Returns what `layer_bytes` says; where the whole model cannot run without values, what was kept when its layers
    ran alone."""
    try:
        return count()
    except Exception as error:  # whatever a model raises on tensors without values
        known = any(timing.saved_bytes for timing in timings[1:-1])
        _log.log(
            logging.INFO if known else logging.WARNING,
            "its memory is estimated layer by layer%s (%s: %s)",
            "" if known else ": what forwards keep is not known, and predictions are too low",
            type(error).__name__,
            error,
        )
    outputs = [handed[0], *handed, 0]
    return tuple(estimated(timing.saved_bytes, size) for timing, size in zip(timings, outputs, strict=True))


def _kind(module: nn.Module, call: ModuleCall) -> str:
    """Returns a text that is the same for modules that cost the same: whole numbers may be a layer's index."""
    tensors = [(name, tuple(t.shape), t.dtype) for name, t in (*module.named_parameters(), *module.named_buffers())]
    settings = [
        (key, value)
        for part in module.modules()
        for key, value in vars(part).items()
        if isinstance(value, (bool, float, str))
    ]
    shapes = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, TensorShape)]
    return repr((type(module), tensors, settings, shapes))


def _time(
    model: nn.Module,
    name: str,
    call: ModuleCall,
    device: torch.device,
    seconds: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Timing | None:
    try:
        return time_call(model.get_submodule(name), call, device, seconds=seconds, autocast=autocast)
    except Exception as error:  # made-up values: anything may go wrong in foreign code
        _log.info("'%s' cannot be measured alone (%s: %s); FLOPs decide", name, type(error).__name__, error)
        return None


def _sum(parts: list[Timing | None]) -> Timing | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Timing(
        sum(part.forward for part in known),
        sum(part.backward for part in known),
        sum(part.saved_bytes for part in known),
        _busy(known),
    )


def _busy(timings: Sequence[Timing]) -> float:
    """Returns the part of their time in which they had a core."""
    times = [timing.forward + timing.backward for timing in timings]
    had = sum(timing.busy * seconds for timing, seconds in zip(timings, times, strict=True))
    return had / sum(times) if sum(times) > 0 else 1.0


def _fill(layers: list[Timing | None], flops: list[int], device: torch.device) -> list[Timing]:
    """Gives layers that were not measured their share by FLOPs; a backward is two forwards."""
    known = [(layer, work) for layer, work in zip(layers, flops, strict=True) if layer is not None and work > 0]
    if known:
        rate = sum(layer.forward for layer, _ in known) / sum(work for _, work in known)
    else:
        matrix = torch.ones(_FALLBACK_SIZE, _FALLBACK_SIZE, device=device)
        begin = time.perf_counter()
        float((matrix @ matrix).sum())
        rate = (time.perf_counter() - begin) / (2 * _FALLBACK_SIZE**3)
    return [
        Timing(rate * work, 2 * rate * work, 0) if layer is None else layer
        for layer, work in zip(layers, flops, strict=True)
    ]


def handed_on(calls: Mapping[str, ModuleCall], trace: Trace, block: int) -> int:
    """Returns the bytes of the tensors that cross the border behind the block; behind the last, of what that returns.

    Args:
        calls: of modules whose results cross. Of others those of the recorded example count, which may have had another
            batch size.
    """
    if block + 1 == len(trace.blocks):
        sizes = [TensorShape(shape, dtype).bytes for shape, dtype in trace.shapes[block]]
        values = [trace.result(block, tensor) for tensor in range(len(sizes))]
    else:
        sizes = [crossing.bytes for crossing in trace.crossings[block + 1]]
        values = [crossing.values[0] for crossing in trace.crossings[block + 1]]
    return sum(_bytes_of(value, calls, size) for value, size in zip(values, sizes, strict=True))


def _bytes_of(value: Value, calls: Mapping[str, ModuleCall], otherwise: int) -> int:
    if value.call or value.module not in calls:
        return otherwise
    tensors = [leaf for leaf in tree_leaves(calls[value.module].result) if isinstance(leaf, TensorShape)]
    return tensors[value.tensor].bytes


def _optimizer_cost(make: Callable[[list[nn.Parameter]], Optimizer] | None, device: torch.device) -> UpdateCost:
    """Returns what `update_cost` says of the user's optimizer, else of AdamW."""
    if make is not None:
        try:
            return update_cost(make, device)
        except Exception as error:  # it may know its parameters by name; whether it can be used is not decided here
            _log.info(
                "the optimizer cannot be measured alone (%s: %s); AdamW stands for it", type(error).__name__, error
            )
    return update_cost(torch.optim.AdamW, device)


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
