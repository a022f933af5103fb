"""Under which names the model's tensors are saved: those the stock `save_pretrained` uses."""

from __future__ import annotations

import torch
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from fold3d.weights.part_marks import state_of
from fold3d.weights.release import parameter_holders


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
