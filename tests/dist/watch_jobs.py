"""Tiny models of several families, trained with tp=2 on batches of many forms."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from fold3d import Engine, ParallelConfig
from fold3d.engine import builder
from fold3d.splitting.prove_again import prove_again
from tests.helpers import data, models

LENGTHS = (12, 7, 16, 9, 15, 5)
"""Of the batches of a step each."""
VOCABULARY = 64


def _grouped() -> PretrainedConfig:
    config = models.mixture_config(dropout=0.1)
    config._experts_implementation = "grouped_mm"
    return config


def _qwen() -> PretrainedConfig:
    return Qwen3MoeConfig(
        num_hidden_layers=4,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        attention_dropout=0.1,
        experts_implementation="batched_mm",
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


FAMILIES: dict[str, tuple[Any, Any]] = {
    "gpt2": (lambda: models.gpt2_config(dropout=0.1), AutoModelForCausalLM),
    "gpt2 with a cache": (lambda: _with_cache(models.gpt2_config(dropout=0.1)), AutoModelForCausalLM),
    "llama": (lambda: models.llama_config(dropout=0.1), AutoModelForCausalLM),
    "t5": (lambda: models.t5_config(dropout=0.1), AutoModelForSeq2SeqLM),
    "bert": (lambda: models.bert_config(dropout=0.1), AutoModelForMaskedLM),
    "mixture": (lambda: models.mixture_config(dropout=0.1), AutoModelForCausalLM),
    "grouped mixture": (_grouped, AutoModelForCausalLM),
    "qwen mixture": (_qwen, AutoModelForCausalLM),
}


def _with_cache(config: PretrainedConfig) -> PretrainedConfig:
    config.use_cache = True
    return config


@dataclass(frozen=True)
class Trained:
    """What came of it on a rank."""

    error: str
    proofs: int
    """How many blocks were proved again behind the first two steps, which have rows with and without padding."""
    losses: list[float]


def train(family: str, layout: dict[str, Any], dtype: str = "float32") -> Trained:
    """Trains as many steps as there are lengths, each followed by an evaluation."""
    config, kind = FAMILIES[family]
    model = models.build(config(), kind=kind, dtype=getattr(torch, dtype))
    proved: list[str] = []

    def counted(*args: Any) -> dict[str, str]:
        proved.extend(args[-1])
        return prove_again(*args)

    losses: list[float] = []
    settled, error = 0, ""
    with mock.patch.object(builder, "prove_again", counted):
        optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
        engine = Engine(model, ParallelConfig(tp=2, micro_batches=2, **layout), optimizer=optimizer)
        try:
            for step, length in enumerate(LENGTHS):
                losses.append(float(engine.step(_batch(length, step)).loss))
                engine.evaluate(_batch(length + 1, step))
                settled = len(proved) if step <= 1 else settled
        except Exception as raised:
            error = str(raised)
        finally:
            engine.close()
    return Trained(error, len(proved) - settled, losses)


def _batch(length: int, step: int) -> dict[str, torch.Tensor]:
    return data.batch(8, length, start=100 * step, padded=step % 2 == 1)
