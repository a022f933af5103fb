"""Weights that no gradient reaches are left alone by the optimizer, in front of a border, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from tests.helpers.ranks import RankPool

ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


class Detached(nn.Module):
    """Four layers; no gradient reaches the first two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x.detach() if number == 2 else x))
        return x.square().mean()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(3)]


def alone() -> dict[str, Tensor]:
    model = Detached()
    optimizer = ADAMW(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return model.state_dict()


def on_layout(**layout: Any) -> dict[str, Tensor]:
    config = ParallelConfig(blocks="layers", micro_batches=2, **layout)
    engine = Engine(Detached(), config, optimizer=ADAMW)
    for batch in batches():
        engine.step({"x": batch})
    weights = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    return weights


@pytest.mark.parametrize(
    "layout",
    [
        {"segments": 2},
        {"segments": 4, "schedule": "aiao"},
        {"segments": 2, "recompute": "full"},
        {"segments": 2, "offload": "activations"},
        {"segments": 2, "offload": "boundaries", "recompute": "full"},
    ],
    ids=str,
)
def test_in_one_process(layout: dict[str, Any]) -> None:
    torch.testing.assert_close(on_layout(**layout), dict(alone()), rtol=1e-12, atol=1e-12)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("more", [{}, {"schedule": "zb_h1"}, {"transport": "c10d"}, {"recompute": "full"}], ids=str)
def test_in_two_processes(ranks: RankPool, more: dict[str, Any]) -> None:
    for found in ranks.run(on_layout, 2, pp=2, segments=1, **more):
        torch.testing.assert_close(found, dict(alone()), rtol=1e-12, atol=1e-12)
