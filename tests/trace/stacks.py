"""Small models with several stacks, or that read again what an earlier part made, in fp64, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_decoder_layers=2, num_heads=4,
            dropout_rate=dropout, decoder_start_token_id=0, relative_attention_num_buckets=8,
        )
    )  # fmt: skip


def _bart(dropout: float) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64,
            dropout=dropout, attention_dropout=dropout, activation_dropout=dropout, pad_token_id=0,
        )
    )  # fmt: skip


def _whisper(dropout: float) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
            max_source_positions=10, max_target_positions=16, dropout=dropout, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def _clip(dropout: float) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 16, "attention_dropout": dropout,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
              "image_size": 8, "patch_size": 4, "attention_dropout": dropout}  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _mpnet(dropout: float) -> nn.Module:
    from transformers import MPNetConfig, MPNetForMaskedLM

    return MPNetForMaskedLM(
        MPNetConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24,
            max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def tokens(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def text_to_text(seed: int = 1) -> dict[str, Tensor]:
    """Of two lengths, padded."""
    ids, labels = tokens(2, 9, seed), tokens(2, 6, seed + 1)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels[1, 5:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _audio() -> dict[str, Tensor]:
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    return {"input_features": sound, "labels": tokens(2, 6, 2)}


def _text_and_image() -> dict[str, Any]:
    ids = tokens(2, 7, 1)
    ids[:, -1] = 2
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    return {"input_ids": ids, "pixel_values": images, "return_loss": True}


def _masked() -> dict[str, Tensor]:
    ids = tokens(2, 9, 1)
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, tuple[Callable[[float], nn.Module], Callable[[], dict[str, Any]]]] = {
    "t5": (_t5, text_to_text),
    "bart": (_bart, text_to_text),
    "whisper": (_whisper, _audio),
    "clip": (_clip, _text_and_image),
    "mpnet": (_mpnet, _masked),
}


def build(family: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model and a batch for it."""
    torch.manual_seed(0)
    model, batch = MODELS[family]
    return model(dropout).double().train(), batch()
