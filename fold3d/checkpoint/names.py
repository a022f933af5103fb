"""Under which names the model's tensors are saved: those the stock `save_pretrained` uses."""

from __future__ import annotations

import torch
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.modeling_utils import remove_tied_weights_from_state_dict


def saved_names(model: Module) -> dict[str, str]:
    """Returns canonical name -> name in the file, of every parameter and persistent buffer that is saved.

    The canonical name of tied weights is the first in the model's order; the file keeps the one the model's
    configuration expects. The same on every rank: no tensor is looked at.
    """
    canonical_of = {name: group[0] for group in tied_groups(model) for name in group}
    names = list(model.state_dict())
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in names if canonical_of.get(name, name) == name}
    shapes = {name: torch.empty(0, device="meta") for name in names}
    for ignored in model._keys_to_ignore_on_save or ():
        shapes.pop(ignored, None)
    kept = remove_tied_weights_from_state_dict(shapes, model)
    return {canonical_of.get(name, name): name for name in kept}


def tied_groups(model: Module) -> list[list[str]]:
    """Returns the groups of names under which the model holds one parameter, the canonical name first."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def persistent_buffers(model: Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that belong to the model's state, by name."""
    state = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def converts_weights(model: Module) -> bool:
    """Whether files of this kind of model hold other tensors or names than the model in memory."""
    if not isinstance(model, PreTrainedModel):
        return False
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    return len(conversions) > 0
