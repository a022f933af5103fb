"""What an Engine's arguments must be, before anything is built."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fold3d.config import AUTO, CLIPPED_EACH_MICRO_BATCH, FP16_WITH_DELAY, ParallelConfig
from fold3d.errors import ConfigError
from fold3d.recompute import Recompute
from fold3d.stage.recompute import check_names
from fold3d.trace.compound import is_compound
from fold3d.weights.release import is_released


def check_arguments(
    config: ParallelConfig, max_grad_norm: float | None, optimizer: Any, autocast: Any, scaler: Any
) -> None:
    """Raises ConfigError for the first argument that is not what Engine can use."""
    if config.gradient_delay and scaler is not None and scaler.is_enabled():
        raise ConfigError(FP16_WITH_DELAY)
    if config.updates_each_micro_batch and max_grad_norm is not None:
        raise ConfigError(CLIPPED_EACH_MICRO_BATCH)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm={max_grad_norm}: must be positive; leave it None for no clipping")
    if optimizer is not None and not callable(optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__} object, made before the model is cut; pass what makes it, "
            "such as functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    if isinstance(autocast, AbstractContextManager) or not callable(autocast):
        raise ConfigError(
            f"autocast is a {type(autocast).__name__} object, which is entered once; pass what makes it, such as "
            'functools.partial(torch.autocast, "cpu", torch.bfloat16)'
        )


def check_model(model: Module, config: ParallelConfig, weights: Any) -> None:
    """Raises ConfigError for a setting that does not fit the model, as far as it is known without a recording."""
    refuse_wrapped(model)
    _check_compound(model, config.tp)
    if weights is not None:
        if not isinstance(weights, (str, os.PathLike)) or not os.fspath(weights):
            raise ConfigError(f"weights={weights!r}: must be the name of a folder, or None")
        if not any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                f"weights={weights!r} has no effect: the model has weights of its own; build it under "
                "torch.device('meta'), or remove weights"
            )
    if config.recompute != AUTO:
        check_names(model, Recompute.parse(config.recompute))


def _check_compound(model: Module, tp: int) -> None:
    for name, parameter in model.named_parameters():
        if not is_compound(parameter):
            continue
        kind = type(parameter).__name__
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} is a {kind}, which is made of several tensors and cannot be trained: gradients are summed in "
                "buckets of plain tensors. Freeze it (requires_grad_(False)) and train adapters, such as PEFT's LoRA"
            )
        if tp > 1:
            raise ConfigError(
                f"tp={tp} is not available for quantised weights: the numbers of {name}, a {kind}, share scales that "
                "are the whole matrix's, so a rank cannot have a part of it. Set tp=1, and pp, segments or dp"
            )


def check_batches(batches: Sequence[Any]) -> None:
    """Raises ConfigError for a batch without names: each stage is given what its part of the model takes, by name."""
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch is a {type(batch).__name__}: it must be a dictionary of the model's arguments and labels by "
                "name. Let the data collator return one, for example {'x': x, 'y': y} instead of (x, y)"
            )


PREPARED: weakref.WeakSet[Module] = weakref.WeakSet()
"""Models that fold3d's own accelerator has prepared, for the training of the Trainer it belongs to."""


def refuse_wrapped(model: Module) -> None:
    """Raises ConfigError for a model that something else has spread over processes or devices already, or prepared."""
    if "_original_forward" in vars(model) and model not in PREPARED:
        raise ConfigError(
            "the model was prepared by accelerate (Accelerator.prepare, or a stock Trainer), which put another forward "
            "before its own. fold3d does that itself; give it the plain model, which "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False) returns"
        )
    wrappers: tuple[type, ...] = (DistributedDataParallel, DataParallel)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long, and whoever wraps with it has done so
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            what = f"its module {name!r}" if name else "it"
            raise ConfigError(
                f"the model is spread over processes already: {what} is a {type(module).__name__}. fold3d does that "
                "itself; give it the plain model, and set dp, tp and pp"
            )


def refuse_two_in_one(model: Module) -> None:
    """Raises ConfigError for a parameter in the memory of another one, of a buffer, or of a tensor that a module keeps:
    put elsewhere, or stepped in parts, they would be two."""
    weights = set(map(id, model.parameters()))
    places: dict[int, tuple[int, int, str, bool]] = {}  # by tensor: its first byte, the first one behind it, its name
    for prefix, module in model.named_modules():
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if not isinstance(value, Tensor) or id(value) in places or is_compound(value):
                continue
            if isinstance(value, torch.nn.Parameter) and is_released(value):
                continue
            if f"{name}_orig" in module._parameters:  # torch's spectral_norm makes it anew in each forward
                continue
            data = value.data
            if data.is_meta or data.layout != torch.strided or not data.numel():
                continue
            elements = 1 + sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True))
            begin = data.data_ptr()
            full = f"{prefix}.{name}" if prefix else name
            places[id(value)] = begin, begin + elements * data.element_size(), full, id(value) in weights
    last = 0, 0, "", False
    for place in sorted(places.values()):
        if place[0] < last[1] and (place[3] or last[3]):
            raise ConfigError(
                f"{last[2]} and {place[2]} are in the same memory, as a view of a weight, its .detach() or .data are. "
                "Tie them as one parameter (set the module's attribute to the other one itself), or compute the one "
                "from the other in the forward"
            )
        last = max(last, place, key=lambda one: one[1])


def refuse_others_parameters(optimizer: Optimizer, model: Module) -> None:
    """Raises ConfigError for an optimizer that steps parameters which are not the model's, such as weights of a loss
    function: each process has its own copy of them, and nobody sums their gradients."""
    own = {number for one in model.parameters() for number in (id(one), getattr(one, "stood_before", 0))}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own and parameter.numel():
                raise ConfigError(
                    f"parameter group {number} of the optimizer has a parameter of shape {list(parameter.shape)} that "
                    "is not the model's, such as a weight of the loss function: each process would train its own copy "
                    "of it. Make it a part of the model, whose forward uses it, or train with one process"
                )


def refuse_odd_buffers(model: Module, processes: int) -> None:
    """Raises ConfigError for buffers that several processes cannot compare, and make alike."""
    for name, buffer in model.named_buffers() if processes > 1 else ():
        kind = "conjugate" if buffer.is_conj() else str(buffer.layout).removeprefix("torch.").replace("_", " ")
        if kind == "strided" and any(
            not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)
        ):
            kind = "expanded"
        if kind != "strided":
            raise ConfigError(
                f"the buffer {name} is {kind}, and {processes} processes compare and share buffers as plain memory: "
                "register what .to_dense(), .resolve_conj() or .clone() makes of it, and convert it in the forward"
            )


def check_compiled(tp: int, options: Mapping[str, Any] | None) -> None:
    """Raises ConfigError where blocks cannot be compiled."""
    if options is not None and tp > 1:
        raise ConfigError(
            f"compiled blocks (torch_compile=True) with tp={tp} are not available: inside of a block shards exchange "
            "data and draw dropout in fold3d's own code, which torch.compile cannot trace; set tp=1, or leave "
            "torch_compile out"
        )
