"""Batches: a synthetic one for transformers models, samples of one, and how a model's loss reads its labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.errors import TraceError

_SEQUENCE = 128


def is_transformers_model(model: nn.Module) -> bool:
    """Returns whether `model` is a transformers PreTrainedModel; False without transformers."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel)


def synthetic_example(model: Any) -> dict[str, Tensor]:
    """Returns a batch of one sample that `model` (a transformers model) accepts; on the meta device, no
    memory.

    Raises: TraceError if the model's main input is neither `input_ids` nor `pixel_values`.
    """
    config = model.config
    main = model.main_input_name
    if main == "input_ids":
        limit = most_tokens(model) or 2 * _SEQUENCE
        # half of the positions: some models (RoBERTa, OPT) number them from an offset
        length = max(1, min(_SEQUENCE, limit // 2))
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            return {"input_ids": ids, "decoder_input_ids": ids}
        return {"input_ids": ids}
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.zeros(1, channels, height, width, dtype=model.dtype, device="meta")}
    raise TraceError(
        f"{type(model).__name__} takes '{main}', for which no example batch can be made up: pass one as "
        "`example` (a dict of tensors, as the model's forward takes them)."
    )


def most_tokens(model: Any) -> int | None:
    """Returns how many positions a transformers model has; None where its configuration does not say."""
    text = model.config.get_text_config()
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((limit for limit in limits if limit), None)


def balances_experts(model: Any) -> bool:
    """Whether the loss of a transformers model has a term that compares how often its experts are chosen."""
    text: Any = getattr(model, "config", None)
    text = text.get_text_config() if hasattr(text, "get_text_config") else text
    return bool(getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 0.0))


def samples_of(inputs: Mapping[str, Any]) -> int | None:
    """Returns the number of samples of a batch by argument name; None where nobody knows how to divide it.

    Dimension 0 of every tensor must be the samples, or 1 for what all of them share; containers could hold anything.
    """
    if borders_in(inputs) is not None:
        return None
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.ndim]
    samples = max((tensor.shape[0] for tensor in tensors), default=0)
    if samples < 2 or any(tensor.shape[0] not in (1, samples) for tensor in tensors):
        return None
    if any(isinstance(value, (dict, list, tuple)) for value in inputs.values()):
        return None
    return samples


def borders_in(inputs: Mapping[str, Any]) -> str | None:
    """Returns the name of an argument that says at which tokens the packed sequences of a row begin (`cu_seq_lens_q`);
    None where there is none. Its entries are places among the tokens, so it cannot be cut as samples are."""
    return next((name for name in inputs if name.startswith(("cu_seq_lens", "cu_seqlens"))), None)


def follows(tensor: Tensor, samples: int) -> bool:
    """Whether dimension 0 of a tensor can be the samples, or so many entries for each of them."""
    return bool(tensor.ndim and tensor.shape[0] and tensor.shape[0] % samples == 0)


def part_of(inputs: Mapping[str, Any], first: int, end: int, samples: int) -> dict[str, Any]:
    """Returns samples [first, end) of a batch of `samples`."""
    return {
        name: value[first:end] if isinstance(value, Tensor) and follows(value, samples) else value
        for name, value in inputs.items()
    }


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
