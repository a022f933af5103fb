"""empty_weights(): builds and loads models without values; every process reads its own part later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.topology import Topology
from fold3d.trace.compound import bytes_of
from fold3d.weights.release import is_released

_FOLDER = "_fold3d_weights"
MANY_BYTES = 1 << 30
"""Of all processes of a host together: from here on somebody is told who need not have them."""


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """A context in which models are made on the meta device: tensors have shapes but no values and take no memory.

        with fold3d.empty_weights():
            model = AutoModelForCausalLM.from_pretrained(name)

    transformers' `from_pretrained` then downloads the files but reads the configuration only. When the Trainer or the
    Engine cuts the model, each rank reads its own part of the weights. A `quantization_config` is applied then, weight
    by weight. A model that is built from a configuration has no files: say with `weights` where its values come from.
    Every process uses the context, and none communicates. Not for several threads at once.

    Raises: ConfigError in `from_pretrained` for files that are not safetensors, or hold quantised weights already.
    """
    from transformers import PreTrainedModel

    names = ("from_pretrained", "_load_pretrained_model", "_finalize_model_loading")
    stock = {name: vars(PreTrainedModel)[name] for name in names}

    def from_pretrained(cls: Any, *args: Any, **named: Any) -> Any:
        with torch.device("cpu"):  # transformers puts what it makes on meta by itself, and refuses who does it for it
            return stock["from_pretrained"].__get__(None, cls)(*args, **named)

    instead = (classmethod(from_pretrained), staticmethod(_note_folder), staticmethod(_tie))
    for name, function in zip(names, instead, strict=True):
        setattr(PreTrainedModel, name, function)
    try:
        with torch.device("meta"):
            yield
    finally:
        for name, function in stock.items():
            setattr(PreTrainedModel, name, function)


def _note_folder(model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any) -> tuple[Any, Any]:
    """In the place of transformers' loading."""
    quantizer = load_config.hf_quantizer
    if quantizer is not None and quantizer.pre_quantized:
        raise ConfigError(
            "the files hold quantised weights already, which fold3d.empty_weights() cannot read part by part: call "
            "from_pretrained outside of it, or give it the model that was not quantised"
        )
    if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
        raise ConfigError(
            "fold3d.empty_weights() reads safetensors, and from_pretrained has found none: save the model again with "
            "save_pretrained, or call from_pretrained outside of it"
        )
    vars(model)[_FOLDER] = str(Path(checkpoint_files[0]).parent)
    from transformers.utils.loading_report import LoadStateDictInfo

    sets = ("missing_keys", "unexpected_keys", "mismatched_keys", "skipped_pp_keys")
    return LoadStateDictInfo(**{name: set() for name in sets}, error_msgs=[], conversion_errors={}), None


def _tie(model: Any, load_config: Any, loading_info: Any) -> Any:
    """In the place of what transformers does with loaded weights."""
    model.tie_weights(recompute_mapping=False)
    return loading_info


def folder_of(model: nn.Module) -> str | None:
    """Returns the folder with the values of a model that was made within `empty_weights`; None for others."""
    return next((vars(one)[_FOLDER] for one in model.modules() if _FOLDER in vars(one)), None)


def whole_on_each(model: nn.Module, topology: Topology, processes: int) -> str:
    """Returns what to say where every process of a host has the values of the whole model, of which it needs a part; ""
    where that costs little.

    Args:
        processes: of this host.
    """
    if topology.pp * topology.tp == 1 or processes == 1 or any(is_released(one) for one in model.parameters()):
        return ""
    size = sum(bytes_of(one) for one in model.parameters())
    if size * processes < MANY_BYTES:
        return ""
    base: Any = model
    base = base.get_base_model() if hasattr(base, "peft_config") else base
    return (
        f"each of the {processes} processes of this host has loaded the whole model, {text_of_bytes(size * processes)} "
        f"in all, and keeps a part of it. Let each read its own part alone:\n    with fold3d.empty_weights():\n"
        f"        model = {type(base).__name__}.from_pretrained(...)"
    )
