"""Stock arguments, models and callbacks that fold3d does not carry out; each with the reason and the way out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch.nn import Module
from transformers.integrations.integration_utils import WandbCallback

from fold3d.checkpoint import adapter_files, has_adapters
from fold3d.errors import ConfigError
from fold3d.trace.compound import is_compound
from fold3d.weights.materialize import waiting_to_be_quantised
from fold3d.weights.release import is_released

_NO_DDP = "fold3d does not use DistributedDataParallel, so it has no effect; remove it"
_WHOLE_CAST = (
    "it casts the weights themselves and leaves them so, but optimizers and replicas share their storage; use "
    "bf16=True, which evaluates under autocast as well"
)

_WITH_VALUES = "load the base model with its weights (from_pretrained) before get_peft_model"

REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fp16_full_eval": (bool, _WHOLE_CAST),
    "bf16_full_eval": (bool, _WHOLE_CAST),
    "deepspeed": (bool, "fold3d places the model itself; remove it and set dp, pp and segments"),
    "fsdp": (bool, "fold3d places the model itself; remove it and set dp, pp and segments"),
    "parallelism_config": (lambda value: value is not None, "set dp, pp and segments instead"),
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
    "ddp_backend": (
        lambda value: value not in (None, "gloo", "nccl"),
        "fold3d communicates over gloo on CPUs and NCCL on GPUs; remove it",
    ),
    "dataloader_in_order": (
        lambda value: value is False,
        "batches would come as workers finish them, so that the processes of a replica trained on different ones; "
        "remove it",
    ),
    "optim_target_modules": (
        bool,
        "GaLore and APOLLO project the gradients of whole matrices, of which a process may have a part; take LoRA "
        "(PEFT), or another optimizer",
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
    if args.use_liger_kernel:
        _refuse_fused_losses(dict(args.liger_kernel_config or {}), getattr(args, "tp", 1) or 1)
    for variable in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise ConfigError(f"{variable} is set: fold3d places the model itself; start the script with torchrun")
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "fp8":
        raise ConfigError("ACCELERATE_MIXED_PRECISION=fp8 is not available; use bf16=True")


def _refuse_fused_losses(config: Mapping[str, Any], tp: int) -> None:
    if config.get("fused_linear_cross_entropy", True) or config.get("cross_entropy", False):
        raise ConfigError(
            "use_liger_kernel=True is not available with Liger's losses: they compute with the output head's weight, "
            "of which this process may have nothing, or a part. Set liger_kernel_config="
            "{'fused_linear_cross_entropy': False, 'cross_entropy': False}, which keeps its norms, SwiGLU and rotary "
            "embeddings, and chunked_loss=1024 for a loss without the logits of all tokens"
        )
    if tp > 1:
        raise ConfigError(
            f"use_liger_kernel=True with tp={tp} is not available: how a block is divided is proved by running its "
            "parts on the CPU, where Triton's kernels do not run; set tp=1, or leave it out"
        )


def refuse_model(model: Module) -> None:
    """Raises ConfigError for what cannot be spread over processes, or saved from there."""
    if getattr(model, "_hf_peft_config_loaded", False) and not has_adapters(model):
        raise ConfigError(
            "the model has adapters by add_adapter or load_adapter, with which the stock Trainer cannot resume either; "
            "give the Trainer peft.get_peft_model(model, config)"
        )
    if has_adapters(model):
        _refuse_adapters_without_values(model)
        adapter_files(model, embeddings=False)
    if getattr(model, "hf_device_map", None) is not None:
        raise ConfigError("the model was loaded with device_map, but fold3d places it; load it without")
    method = getattr(model, "quantization_method", None)
    if method is not None and not any(map(is_compound, model.parameters())) and not waiting_to_be_quantised(model):
        raise ConfigError(
            f"{getattr(method, 'value', method)} keeps its weights in buffers, which every process would hold whole; "
            "quantise with bitsandbytes (BitsAndBytesConfig) or torchao (TorchAoConfig), or load the model as it is"
        )


def refuse_own_state(model: Module) -> None:
    """Raises ConfigError for a model with a module whose checkpoints hold something besides parameters and buffers."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not Module.get_extra_state:
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) keeps a state of its own for checkpoints "
                "(get_extra_state), which fold3d neither saves nor loads: keep it in a buffer"
            )


def _refuse_adapters_without_values(model: Any) -> None:
    if not any(is_released(one) or one.is_meta for one in model.parameters()):
        return
    for name, parameter in model.named_parameters():
        if parameter.is_meta and parameter.requires_grad and "lora_" not in name and "modules_to_save" not in name:
            raise ConfigError(f"{name} is an adapter on the meta device that only PEFT can begin; {_WITH_VALUES}")
    for adapter, config in model.peft_config.items():
        begins = getattr(config, "init_lora_weights", None)
        if begins is not True and begins != "gaussian":
            raise ConfigError(
                f"adapter {adapter!r} has init_lora_weights={begins!r}, and the model lies on the meta device, where "
                f"LoRA begins with True or 'gaussian'; {_WITH_VALUES}"
            )


def refuse_callbacks(callbacks: list[Any]) -> None:
    """Raises ConfigError for callbacks of transformers that need the whole model."""
    for callback in callbacks:
        way = getattr(callback, "_log_model", None)
        if isinstance(callback, WandbCallback) and way is not None and way.is_enabled:
            raise ConfigError(
                f"WANDB_LOG_MODEL={way.value} is not available: at the end transformers' callback has a stock Trainer "
                "save the model, of which a process may have a part; remove it and log what trainer.save_model() wrote"
            )
