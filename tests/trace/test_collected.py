"""What transformers collects of layers while a model runs is the same on every chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from fold3d.trace import trace
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, whole


class Picking(nn.Module):
    """Reads some of the hidden states that it has its model collect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LlamaModel(
            LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
                num_key_value_heads=2,
            )
        )  # fmt: skip

    def forward(self, input_ids: Tensor) -> Any:
        states = self.inner(input_ids, output_hidden_states=True, use_cache=False).hidden_states
        assert len(states) == 5
        return {"loss": (states[2] * states[3].tanh() + states[4]).square().mean()}


def test_modules_that_run_on_shapes_are_not_collected() -> None:
    torch.manual_seed(0)
    model = Picking().double()
    batch = {"input_ids": torch.arange(12).reshape(2, 6)}
    recorded = trace(model, example=batch)
    for ranges in cuts(4):
        assert_equal(chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), batch), whole(model, batch))
