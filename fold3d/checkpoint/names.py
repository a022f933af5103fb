"""Under which names the model's tensors are saved: those the stock `save_pretrained` uses. Adapters: which tensors of a
PeftModel are saved, in which file and under which name; PEFT's own code tells.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from fold3d.errors import CheckpointError, ConfigError
from fold3d.weights.part_marks import state_of
from fold3d.weights.parts import Parts
from fold3d.weights.pretrained import PretrainedFolder
from fold3d.weights.release import parameter_holders

ADAPTER_FILE = "adapter_model.safetensors"

AdapterFiles = dict[str, dict[str, str]]
"""File, as a path in the folder -> {name in the file: canonical name in the model}."""


def has_adapters(model: Module) -> bool:
    """Whether the model is one of PEFT's, of which adapters are saved and nothing else."""
    peft: Any = sys.modules.get("peft")  # who has such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_files(model: Any, *, embeddings: bool | Literal["auto"] = "auto") -> AdapterFiles:
    """Returns what `model.save_pretrained` would write. No value is looked at, so all ranks find the same.

    Args:
        model: a PeftModel.
        embeddings: PEFT's save_embedding_layers; "auto" may ask the Hub for the base model's configuration.
    Raises: ConfigError for adapters that are computed when they are saved, from weights of which a rank may have none.
    """
    from peft import get_peft_model_state_dict

    canonical_of = first_names(model)
    stand_ins = {name: torch.tensor([number]) for number, name in enumerate(canonical_of)}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    files: AdapterFiles = {}
    for adapter, config in model.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        computed = ConfigError(
            f"adapter {adapter!r} is of the kind {kind}, which PEFT computes from weights of the whole model when it "
            "saves; here a process may have a part of them. Use one that is saved as it is, such as LoRA"
        )
        if config.is_prompt_learning:
            raise computed
        try:
            saved = get_peft_model_state_dict(
                model, state_dict=dict(stand_ins), adapter_name=adapter, save_embedding_layers=embeddings
            )
        except (RuntimeError, IndexError) as error:  # it wanted tensors of the real shapes
            raise computed from error
        if any(id(stand_in) not in name_of for stand_in in saved.values()):
            raise computed
        names = {key: name_of[id(stand_in)] for key, stand_in in saved.items()}
        path = ADAPTER_FILE if adapter == "default" else f"{adapter}/{ADAPTER_FILE}"
        files[path] = {key: canonical_of[name] for key, name in names.items()}
    return files


def load_adapters(files: AdapterFiles, targets: Mapping[str, Tensor], folder: Path, parts: Parts) -> None:
    """Fills those of `targets` in place that belong to adapters, from what `model.save_pretrained` wrote.

    Args:
        targets: parameters and buffers of this rank by canonical name, any device and dtype.
        parts: which part of each parameter the targets are.
    Raises: CheckpointError naming the file that is not there or damaged, or the tensor that is missing or of another
        shape.
    """
    for file, names in files.items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {file}: it is not a checkpoint of this PeftModel")
        source = PretrainedFolder(path.parent, path.stem)
        found = set(source.keys())
        for key, name in names.items():
            if key not in found:
                raise CheckpointError(f"{path} does not hold {key}: it belongs to another adapter")
            if name not in targets:
                continue
            shape, whole = source.shape(key), tuple(parts.whole_shape(name, targets[name].shape))
            if shape != whole:
                raise CheckpointError(f"{path}: {key} has shape {shape}, but the model's has {whole}")
            source.read_into(key, targets[name], parts.shard_of(name), parts.rank)


def saved_names(model: Module) -> dict[str, str]:
    """Returns canonical name -> name in the file, of every parameter and persistent buffer that is saved.

    The canonical name of tied weights is the first in the model's order; the file keeps the one the model's
    configuration expects, renamed as `save_pretrained` renames it. The same on every rank, whatever of the model lies
    there: no value is looked at. A model whose weights are converted (`converts_weights`) keeps its names in memory.

    Raises: RuntimeError, as `save_pretrained` does, for weights tied otherwise than the configuration says.
    """
    canonical_of = {name: group[0] for group in tied_groups(model) for name in group}
    objects = state_of(model, keep_vars=True)
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in objects if canonical_of.get(name, name) == name}
    # transformers tells tied weights by their memory, and those of other ranks have none here: one number for each.
    names = list(objects)
    memory = {id(objects[name]): torch.tensor([number]) for number, name in enumerate(names)}
    stand_ins = {name: memory[id(objects[name])] for name in names}
    for ignored in model._keys_to_ignore_on_save or ():
        stand_ins.pop(ignored, None)
    kept = remove_tied_weights_from_state_dict(stand_ins, model)
    if not converts_weights(model):
        kept = revert_weight_conversion(model, kept)
    saved = {names[int(number)]: name for name, number in kept.items()}
    return {canonical_of.get(name, name): there for name, there in saved.items()}


def tied_groups(model: Module) -> list[list[str]]:
    """Returns the groups of names under which the model holds one parameter, the canonical name first."""
    return [names for _, names in parameter_holders(model) if len(names) > 1]


def first_names(model: Module) -> dict[str, str]:
    """Returns of each parameter and persistent buffer the first name in the model's order under which it is there."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in state_of(model, keep_vars=True).items()}


def persistent_buffers(model: Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that belong to the model's state, by name."""
    state = state_of(model).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def converts_weights(model: Module) -> bool:
    """Whether files of this kind of model hold other tensors, not only other names, than the model in memory."""
    if not isinstance(model, PreTrainedModel):
        return False
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(entry, WeightConverter) for entry in conversions)
