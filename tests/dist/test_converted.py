"""Modules that convert their own parameters in the forward: buckets and optimizer hold these as they are after it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import fold3d
from tests.helpers.ranks import RankPool
from tests.trace import test_conversions

pytestmark = pytest.mark.dist

STEPS = 3
Result = tuple[list[float], dict[str, Tensor]]


class Routed(test_conversions.Routed):
    """Returns its loss."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)["loss"]


def built() -> Routed:
    torch.manual_seed(0)
    return Routed(torch.float32).to(torch.float64)


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def alone() -> Result:
    model, losses = built(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = model(inputs(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def cut(dp: int) -> Result:
    model = built()
    torch.set_default_dtype(torch.float64)  # of the losses; set after the weights are drawn
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    config = fold3d.ParallelConfig(pp=2, segments=2, micro_batches=1, comm_timeout=60.0)
    engine = fold3d.Engine(model, config, optimizer=make, example={"inputs": inputs(0)})
    rank, losses = engine.topology.dp_rank, list[float]()
    for step in range(STEPS):
        mine = inputs(step).chunk(dp)[rank]
        losses.append(engine.step({"inputs": mine}).loss.item())
    assert {one.dtype for name, one in engine.owned.items() if "classifier" in name} == {torch.float32}
    weights = engine.state_dict()["model"]
    engine.close()
    return losses, weights


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp", [1, 2])
def test_routers_that_convert_themselves_train_as_in_one_process(ranks: RankPool, dp: int) -> None:
    losses, weights = alone()
    assert {name for name, one in weights.items() if one.dtype == torch.float32} == {
        f"layers.{layer}.classifier.{kind}" for layer in range(4) for kind in ("weight", "bias")
    }
    found = ranks.run(cut, 2 * dp, dp)
    for got, tensors in found:
        assert got == pytest.approx(losses, rel=1e-6)
        for name, tensor in tensors.items():
            assert tensor.dtype == weights[name].dtype
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
