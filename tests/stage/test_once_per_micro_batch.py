"""What the model's front and the loss do once per micro-batch, although they run for every chunk."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fold3d
from fold3d import Engine, ParallelConfig
from tests.helpers.ranks import RankPool

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Front(nn.Module):
    """Normalises its inputs without parameters, and keeps a mean and a count of them."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.norm(x - self.mean)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained(layout: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of two steps of three micro-batches, and the state then."""
    torch.manual_seed(0)
    model = Front()
    batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
    engine = Engine(model, ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step(batch).loss.item() for _ in range(2)]
    state = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    return losses, state


@pytest.mark.gate
def test_buffers_in_front_of_the_blocks(ranks: RankPool) -> None:
    losses, state = trained({"segments": 1})
    assert state["count"].item() == 6 and state["norm.num_batches_tracked"].item() == 6
    cut = [trained({"segments": 2}), trained({"segments": 4}), *ranks.run(trained, 2, {"pp": 2, "segments": 2})[:1]]
    for found, buffers in cut:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-12, atol=0.0)
        for name, value in state.items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-14, msg=name)


class Chain(nn.Module):
    """A chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def changes_in_place(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch["y"] -= 1
    return (model(x=batch["x"]) - batch["y"]).square().mean()


def in_place(layout: dict[str, int]) -> float | str:
    """Returns the loss of a step whose loss function changes its labels, or the error."""
    torch.manual_seed(0)
    engine = Engine(Chain(), ParallelConfig(micro_batches=1, blocks="layers", **layout))
    try:
        loss = engine.run([{"x": torch.ones(2, 4), "y": torch.ones(2, 4)}], changes_in_place).item()
        engine.close()
        return loss
    except (fold3d.Fold3dError, RuntimeError) as error:
        return str(error)


def test_micro_batches_changed_in_place(ranks: RankPool) -> None:
    """They were changed again for every chunk, and once more to find out how the model is called."""
    right = in_place({"segments": 1})
    assert isinstance(right, float)
    assert ranks.run(in_place, 2, {"pp": 2}) == pytest.approx([right] * 2)
    assert in_place({"segments": 2}) == pytest.approx(right)


def draws(layout: dict[str, int]) -> tuple[float, float, float]:
    """Returns the loss of a step whose loss function draws from Python and numpy, and their next numbers."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        x = batch["x"] * (random.random() + np.random.rand())
        return random.random() * model(x=x).square().mean()

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(0)
    engine = Engine(Chain(), ParallelConfig(micro_batches=2, blocks="layers", **layout))
    value = engine.run([{"x": torch.ones(2, 4)}] * 2, loss).item()
    engine.close()
    return value, random.random(), np.random.rand()


@pytest.mark.gate
def test_random_numbers_of_python_and_numpy(ranks: RankPool) -> None:
    """Chunks drew one after the other, and so did finding out how the model is called."""
    alone = draws({"segments": 1})
    for found in (draws({"segments": 2}), draws({"segments": 4}), *ranks.run(draws, 2, {"pp": 2, "segments": 2})):
        assert found == pytest.approx(alone, rel=1e-6)
        assert found[1:] == alone[1:]
