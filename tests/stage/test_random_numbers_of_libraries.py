"""Python's and numpy's generators, and those of the user's, where a model is cut: what one process draws and another
does not leaves them alike, and no number comes twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import RankError
from tests.helpers.ranks import RankPool

MICRO_BATCHES = 2
STEPS = 2
CUT = [(1, {"segments": 2}), (2, {"pp": 2}), (2, {"pp": 2, "segments": 2})]
IDS = ["segments=2", "pp=2", "both"]


class Net(nn.Module):
    """Four layers; fp64 [rows, 4] -> [rows, 4]."""

    def __init__(self, draws: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(draws) for _ in range(4))
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        if "front" in self.draws:
            x = x * random.random() + np.random.rand()
        for layer in self.layers:
            if self.draws == "between":
                random.random()
            x = layer(x)
        if self.draws == "behind":
            x = x * random.random()
        return x


class Layer(nn.Module):
    def __init__(self, draws: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + np.random.rand() if "inside" in self.draws else 1.0
        return x + self.linear(x) * scale


class Loss:
    """Weighs by random numbers that it draws behind the model's call, and perhaps in front of it, too."""

    def __init__(self, of: str) -> None:
        self.of = of
        self.python, self.numpy = random.Random(3), np.random.default_rng(4)
        self.old, self.torch = np.random.RandomState(5), torch.Generator().manual_seed(6)

    def number(self) -> float:
        made: dict[str, Callable[[], float]] = {
            "libraries": lambda: random.random() + np.random.rand(),
            "python": self.python.random,
            "numpy": self.numpy.random,
            "old": self.old.rand,
            "torch": lambda: torch.rand((), generator=self.torch).item(),
        }
        return made[self.of.split()[0]]()

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        front = self.number() if "both" in self.of else 1.0
        out: Tensor = model(batch["x"])
        return out.square().mean() * self.number() * front


def data(*, draws: bool) -> Iterator[dict[str, Any]]:
    for _ in range(MICRO_BATCHES):
        yield {"x": torch.full((2, 4), random.random() if draws else 0.5, dtype=torch.float64)}


def trained(
    layout: dict[str, int], of: str = "", model_draws: str = "", data_draws: bool = False
) -> tuple[list[float], float]:
    """Returns losses, and the next number of Python's generator."""
    torch.manual_seed(0)
    random.seed(2)
    np.random.seed(3)
    loss: Any = Loss(of) if of else lambda model, batch: model(batch["x"]).square().mean()
    engine = Engine(
        Net(model_draws).double(), ParallelConfig(blocks="layers", micro_batches=MICRO_BATCHES, seed=7, **layout)
    )
    try:
        losses = [engine.run(list(data(draws=data_draws)), loss).item() for _ in range(STEPS)]
        return losses, random.random() + np.random.rand()
    finally:
        engine.close()


def refused(layout: dict[str, int], of: str) -> str:
    with pytest.raises(RankError) as error:
        trained(layout, of)
    return str(error.value)


@pytest.mark.gate(cases=6)
@pytest.mark.parametrize("of", ["libraries", "python", "numpy", "old", "torch"])
@pytest.mark.parametrize(("processes", "layout"), CUT, ids=IDS)
def test_what_a_loss_draws_behind_the_call_goes_on(
    ranks: RankPool, processes: int, layout: dict[str, int], of: str
) -> None:
    expected, after = trained({"segments": 1}, of)
    for losses, left in ranks.run(trained, processes, layout, of):
        assert losses == pytest.approx(expected, rel=1e-12)
        if processes == 1:
            assert left == after


@pytest.mark.gate(cases=3)
@pytest.mark.parametrize("of", ["libraries both", "torch both"])
@pytest.mark.parametrize(("processes", "layout"), CUT, ids=IDS)
def test_a_loss_that_draws_on_both_sides_is_refused(
    ranks: RankPool, processes: int, layout: dict[str, int], of: str
) -> None:
    for text in ranks.run(refused, processes, layout, of):
        assert "random numbers from the same generator before and behind the model's call" in text


def test_one_micro_batch_may_draw_on_both_sides_in_one_process() -> None:
    def losses(segments: int) -> list[float]:
        torch.manual_seed(0)
        loss = Loss("python both")
        engine = Engine(Net().double(), ParallelConfig(blocks="layers", micro_batches=1, segments=segments))
        try:
            return [engine.run([{"x": torch.ones(2, 4, dtype=torch.float64)}], loss).item() for _ in range(3)]
        finally:
            engine.close()

    assert losses(2) == pytest.approx(losses(1), rel=1e-12)


def test_data_are_the_same_on_all_stages_whatever_the_loss_draws(ranks: RankPool) -> None:
    layout = {"pp": 2}
    found = ranks.run(trained, 2, layout, "libraries", "", True)
    assert len({left for _, left in found}) == 1, "the generators are alike on all stages"
    losses = found[0][0]
    assert len(set(losses)) == STEPS


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("draws", ["front inside", "behind", "front", "between", "inside"])
def test_what_a_model_draws_is_the_same_however_it_is_cut(ranks: RankPool, draws: str) -> None:
    found = [ranks.run(trained, processes, layout, "", draws) for processes, layout in CUT]
    for of_layout in found:
        assert len({left for _, left in of_layout}) == 1, "the generators are alike on all stages"
        assert all(losses == pytest.approx(found[0][0][0], rel=1e-12) for losses, _ in of_layout)
    expected, _ = trained({"segments": 1}, "", draws)
    if draws in ("front", "between"):
        assert found[0][0][0] == pytest.approx(expected, rel=1e-12)
    else:
        assert len(set(found[0][0][0])) == STEPS, "other numbers in each step"
