"""Blocks that are like others need not run to know their bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

import fold3d.profile.layer_bytes as module
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.trace import trace
from tests.helpers.models import MODELS


def t5() -> nn.Module:
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=6, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    return AutoModelForSeq2SeqLM.from_config(config)


def causal(kind: str, **changes: Any) -> nn.Module:
    config = MODELS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


class Growing(nn.Module):
    """One block keeps more: a setting says so; another one is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping(2 if k == 6 else 1) for k in range(15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, often=number == 11)
        return x.sum()


class Keeping(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, often: bool) -> torch.Tensor:
        for _ in range(self.times + 2 * often):
            x = self.linear(x.square())
        return x


IDS = torch.zeros(2, 16, dtype=torch.long)
CASES = {
    "gpt2": (lambda: causal("gpt2", n_layer=7), {"input_ids": IDS, "labels": IDS}),
    "llama": (lambda: causal("llama", num_hidden_layers=7), {"input_ids": IDS, "labels": IDS}),
    "t5": (t5, {"input_ids": IDS, "labels": IDS}),
    "growing": (Growing, {"x": torch.zeros(4, 8)}),
}


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("case", CASES)
def test_what_stand_ins_say_is_what_running_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch = CASES[case]
    model = build()
    recording = trace(model, example=batch)
    found = layer_bytes(model, recording, batch)

    twins = module.Twins(model, recording, batch).of
    monkeypatch.setattr(module, "Twins", lambda *_: SimpleNamespace(of={}))
    assert found == layer_bytes(build(), recording, batch)
    assert len(twins) >= 2
