"""How a transformers model's loss reads its labels."""

from __future__ import annotations

from torch import nn

IGNORED = -100
"""torch's label of what counts for nothing."""


def shifts_labels(model: nn.Module) -> bool:
    """Returns whether position i of the model predicts label i + 1, so that the first label of a row is no target.

    By the rule of the stock Trainer, so that both divide by the same number: the model's `loss_type` stands for
    ForCausalLMLoss in transformers' LOSS_MAPPING, and the model is no encoder-decoder, whose decoder is given shifted
    inputs instead. False for other models.
    """
    try:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    except ImportError:
        return False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss
