"""How a transformers model's loss reads its labels."""

from __future__ import annotations

import inspect

from torch import nn

IGNORED = -100
"""torch's label of what counts for nothing."""


def shifts_labels(model: nn.Module) -> bool:
    """Returns whether position i of the model predicts label i + 1, so that the first label of a row is no target.

    That is so where `model.loss_function`, as transformers looks it up, is ForCausalLMLoss: that of the model's
    `loss_type`, and of a class whose name says nothing of its loss (GPT2LMHeadModel). The stock Trainer counts all
    labels of the latter. Not so for an encoder-decoder, whose decoder is given shifted inputs instead, nor for others.
    """
    try:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    except ImportError:
        return False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    given = getattr(model, "_loss_function", None)  # of `model.loss_function = ...`
    if given in LOSS_MAPPING.values():
        return given is ForCausalLMLoss
    named = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    return named is ForCausalLMLoss or (named is None and _asks_for_it(model))


def _asks_for_it(model: nn.Module) -> bool:
    """Whether the model's forward takes its loss from `loss_function`; one with a loss of its own has that, too."""
    outermost = next((module for module in model.modules() if "loss_type" in vars(module)), None)
    forward = inspect.unwrap(type(outermost).forward) if outermost is not None else None
    return "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())
