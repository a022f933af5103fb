"""model_from_config(): a transformers model without weights, from its configuration alone."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fold3d.errors import ConfigError


def model_from_config(path: str) -> nn.Module:
    """Returns the model that a transformers folder, config.json or name on the hub stands for, on the meta device: no
    weights are read.

    Raises: ConfigError if there is no configuration, or if it does not say which class the model has.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        if not os.path.exists(path):
            raise ConfigError(
                f"{path!r} is neither a folder, nor a config.json, nor MODULE:FUNCTION, and there is no model of that "
                f"name: {error}"
            ) from None
        raise ConfigError(f"{path!r} holds no transformers configuration: {error}") from None
    architectures = getattr(config, "architectures", None) or []
    model_class: Any = getattr(transformers, architectures[0], None) if architectures else None
    if model_class is None:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ConfigError(
            f"{path!r} names no known architecture ({architectures}), and model type {config.model_type!r} "
            "is no "
            'causal language model; set "architectures" in its config.json'
        )
    try:
        with torch.device("meta"):
            model: nn.Module = model_class(config)
    except Exception as error:  # of values that do not go together there is no end of kinds
        raise ConfigError(
            f"{path!r} makes no {getattr(model_class, '__name__', model_class)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f'{path!r}: "architectures" names {architectures[0]!r}, which is no model')
    return model


def dtype_of_config(path: str) -> str | None:
    """Returns the name of the dtype that a configuration says its weights have; None where it does not, or is none."""
    import transformers

    try:
        found, _ = transformers.PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError, AttributeError):  # `model_from_config` says it better
        return None
    dtype = found.get("dtype") or found.get("torch_dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")
