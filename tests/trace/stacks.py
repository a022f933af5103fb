"""Small models with several stacks, or that read again what an earlier part made, in fp64, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

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


def _albert(dropout: float) -> nn.Module:
    """Two blocks, each of which runs twice."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCABULARY, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_hidden_groups=2,
            num_attention_heads=4, intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def _mixtral(dropout: float) -> nn.Module:
    """Its loss reads the logits of all routers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, num_local_experts=4, attention_dropout=dropout, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # the other one has no kernel in double precision
    return model


class _Block(GradientCheckpointingLayer):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 24), nn.Linear(24, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = hidden + hidden.mean(1, keepdim=True)
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(mixed)))))


class _Tower(nn.Module):
    """Encodes patches; its own code asks a weight where to put them."""

    def __init__(self, depth: int, dropout: float) -> None:
        super().__init__()
        self.patches, self.pool = nn.Linear(6, 12), nn.Linear(12, 12)
        self.blocks = nn.ModuleList(_Block(12, dropout) for _ in range(depth))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.patches(pixels.to(device=self.patches.weight.device))
        half: Tensor = hidden
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            half = hidden if number == 0 else half
        return hidden, half, self.pool(hidden[:, 0])


class _Language(nn.Module):
    """Adds features of the images' half way to what its first layer returns, where their places are."""

    def __init__(self, depth: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(_Block(16, dropout) for _ in range(depth))

    def forward(self, hidden: Tensor, places: Tensor, deep: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if number == 0:
                hidden = hidden + torch.zeros_like(hidden).masked_scatter(places, deep)
        return hidden


class Seeing(nn.Module):
    """A tower for images, two projectors, and a language model into whose text the images' features are scattered.

    What it returns carries the features, as the models of transformers do, though no loss reads them.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tower, self.language = _Tower(3, dropout), _Language(3, dropout)
        self.projector, self.deep = nn.Linear(12, 16), nn.Linear(12, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        last, half, _ = self.tower(pixel_values)
        features, deep = self.projector(last), self.deep(half)
        places = (input_ids == PLACE)[..., None].expand(*input_ids.shape, 16)
        hidden = self.language.embed(input_ids).masked_scatter(places, features)
        logits = self.head(self.language(hidden, places, deep))
        found = {"logits": logits, "image_hidden_states": features}
        if labels is not None:
            found = {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), **found}
        return found


PLACE = 3
"""The token that stands for a feature of an image."""


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


def _text_in_which_images_are() -> dict[str, Tensor]:
    ids = tokens(2, 9, 1).clamp(min=PLACE + 1)
    ids[:, 1:5] = PLACE
    images = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    return {"input_ids": ids, "pixel_values": images, "labels": ids.clone()}


def _masked() -> dict[str, Tensor]:
    ids = tokens(2, 9, 1)
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, tuple[Callable[[float], nn.Module], Callable[[], dict[str, Any]]]] = {
    "t5": (_t5, text_to_text),
    "bart": (_bart, text_to_text),
    "whisper": (_whisper, _audio),
    "clip": (_clip, _text_and_image),
    "mpnet": (_mpnet, _masked),
    "albert": (_albert, _masked),
    "mixtral": (_mixtral, _masked),
    "seeing": (Seeing, _text_in_which_images_are),
}


def build(family: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model and a batch for it."""
    torch.manual_seed(0)
    model, batch = MODELS[family]
    return model(dropout).double().train(), batch()
