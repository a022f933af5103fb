"""Stock arguments, models and callbacks that fold3d does not carry out; each with the reason and the way out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import transformers
from torch.nn import Module
from transformers.integrations.integration_utils import WandbCallback

from fold3d.checkpoint import adapter_files, has_adapters
from fold3d.errors import ConfigError

_NO_DDP = "fold3d does not use DistributedDataParallel, so it has no effect; remove it"
_WHOLE_CAST = (
    "it casts the weights themselves and leaves them so, but optimizers and replicas share their storage; use "
    "bf16=True, which evaluates under autocast as well"
)

REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fp16_full_eval": (bool, _WHOLE_CAST),
    "bf16_full_eval": (bool, _WHOLE_CAST),
    "deepspeed": (bool, "fold3d places the model itself; remove it and set dp, pp and segments"),
    "fsdp": (bool, "fold3d places the model itself; remove it and set dp, pp and segments"),
    "parallelism_config": (lambda value: value is not None, "set dp, pp and segments instead"),
    "use_liger_kernel": (
        bool,
        "its Triton kernels need values in a GPU's memory, and fold3d records the model, head included, on tensors "
        "without values before it is cut or replicated; leave it out",
    ),
    "save_on_each_node": (
        bool,
        "a checkpoint is one folder, which all processes write and read; put output_dir where all nodes see it",
    ),
    "ddp_find_unused_parameters": (lambda value: value is not None, _NO_DDP),
    "ddp_bucket_cap_mb": (lambda value: value is not None, _NO_DDP),
    "ddp_broadcast_buffers": (
        lambda value: value is False,
        "before a step all replicas take replica 0's buffers, as with True; remove it",
    ),
    "ddp_static_graph": (lambda value: value is not None, _NO_DDP),
    "optim": (
        lambda value: any(word in str(getattr(value, "value", value)) for word in ("lomo", "layerwise")),
        "it updates weights inside the backward pass, before gradients are summed and clipped; use an optimizer "
        "that steps afterwards, e.g. adamw_torch",
    ),
}


def refuse_unsupported(args: transformers.TrainingArguments) -> None:
    """Raises ConfigError for the first stock argument (or accelerate setting) that fold3d does not carry out."""
    for name, (is_set, reason) in REFUSED.items():
        value = getattr(args, name)
        if is_set(value):
            raise ConfigError(f"{name}={getattr(value, 'value', value)!r} is not available: {reason}")
    for variable in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise ConfigError(f"{variable} is set: fold3d places the model itself; start the script with torchrun")
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "fp8":
        raise ConfigError("ACCELERATE_MIXED_PRECISION=fp8 is not available; use bf16=True")


def refuse_model(model: Module) -> None:
    """Raises ConfigError for what cannot be spread over processes, or saved from there."""
    if getattr(model, "_hf_peft_config_loaded", False) and not has_adapters(model):
        raise ConfigError(
            "the model has adapters by add_adapter or load_adapter, with which the stock Trainer cannot resume either; "
            "give the Trainer peft.get_peft_model(model, config)"
        )
    if has_adapters(model):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                "a PeftModel on the meta device is not available: its adapters have no values to begin with; load the "
                "base model (from_pretrained) before get_peft_model"
            )
        adapter_files(model, embeddings=False)
    if getattr(model, "hf_device_map", None) is not None:
        raise ConfigError("the model was loaded with device_map, but fold3d places it; load it without")
    if getattr(model, "quantization_method", None) is not None:
        raise ConfigError("quantised models are not available: load the model without quantization_config")


def refuse_callbacks(callbacks: list[Any]) -> None:
    """Raises ConfigError for callbacks of transformers that need the whole model."""
    for callback in callbacks:
        way = getattr(callback, "_log_model", None)
        if isinstance(callback, WandbCallback) and way is not None and way.is_enabled:
            raise ConfigError(
                f"WANDB_LOG_MODEL={way.value} is not available: at the end transformers' callback has a stock Trainer "
                "save the model, of which a process may have a part; remove it and log what trainer.save_model() wrote"
            )
