"""With which arguments a model calls its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fold3d.profile.calls import record_calls
from fold3d.trace import trace
from tests.helpers.models import MODELS
from tests.trace.zoo import Block

IDS = torch.zeros(2, 16, dtype=torch.long)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("kind", "layers"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_blocks_that_need_not_run_are_called_as_their_twins(kind: str, layers: str) -> None:
    config: Any = MODELS[kind]()
    setattr(config, layers, 9)
    model = AutoModelForCausalLM.from_config(config)
    batch = {"input_ids": IDS, "labels": IDS}
    recording = trace(model, example=batch)
    names = [name for name, _ in model.named_modules() if name]
    found, all_ran = record_calls(model, names, batch, trace=recording), record_calls(model, names, batch)
    assert found.keys() == all_ran.keys()
    assert str(found) == str({name: all_ran[name] for name in found})


class Counted(Block):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs += 1
        y: Tensor = super().forward(x)
        return y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted(8) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_of_equal_blocks_a_few_run() -> None:
    model, batch = Stack(), {"x": torch.zeros(3, 8)}
    recording = trace(model, example=batch)
    names = [f"layers.{number}.up" for number in range(40)]
    Counted.runs = 0
    found = record_calls(model, names, batch, trace=recording)
    assert 0 < Counted.runs < 10
    assert found == record_calls(model, names, batch) and len(found) == 40
