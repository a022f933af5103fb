"""State that a loss function keeps where it is not looked for: wrong where the model is cut, and known to be.

Several micro-batches are under way then, and what one sets before the model's call another has changed before it is
read. Each of these must become equal to one process, or an error; docs/processes.md names them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import Fold3dError

MICRO_BATCHES = 3


class Net(nn.Module):
    """Four layers, fp64 [rows, 4] -> [rows, 1]; `factor` and `aux` are attributes of the model itself."""

    factor = 1.0
    aux: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.aux = 0.0
        for layer in self.layers:
            x = x + layer(x).tanh()
        self.aux = self.aux + x.square().mean()
        out: Tensor = self.head(x * self.factor)
        return out


class SetsTheSame:
    """The first micro-batch sets what was there already, so it does not look like a change."""

    weight = 1.0

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        model.eval()
        self.weight = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * self.weight


def in_a_closure() -> Callable[[Any, dict[str, Any]], Tensor]:
    state: dict[str, float] = {}

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        model.eval()
        state["w"] = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * state["w"]

    return loss


def in_the_model(model: Any, batch: dict[str, Any]) -> Tensor:
    model.eval()
    model.factor = batch["w"]
    out: Tensor = model(batch["x"])
    return out.square().mean()


def toggles(model: Any, batch: dict[str, Any]) -> Tensor:
    model.eval()
    out: Tensor = model(batch["x"])
    model.train()
    return out.square().mean()


def reads_what_the_model_keeps(model: Any, batch: dict[str, Any]) -> Tensor:
    model.eval()
    out = model(batch["x"])
    total: Tensor = out.square().mean() + model.aux
    return total


def run(function: Callable[[Any, dict[str, Any]], Tensor], segments: int) -> float:
    torch.manual_seed(0)
    model = Net().double()
    torch.manual_seed(1)
    batches = [{"x": torch.randn(2, 4, dtype=torch.float64), "w": float(i + 1)} for i in range(MICRO_BATCHES)]
    if not segments:
        return sum(function(model, batch).item() for batch in batches)
    engine = Engine(model, ParallelConfig(segments=segments, blocks="layers", micro_batches=MICRO_BATCHES))
    try:
        return engine.run(batches, function).item()
    finally:
        engine.close()


CASES: dict[str, Callable[[], Callable[[Any, dict[str, Any]], Tensor]]] = {
    "the same value": SetsTheSame,
    "a closure": in_a_closure,
    "an attribute of the model": lambda: in_the_model,
    "eval and train": lambda: toggles,
    "what the model keeps": lambda: reads_what_the_model_keeps,
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_cut(case: str) -> None:
    assert run(CASES[case](), 1) == pytest.approx(run(CASES[case](), 0), rel=1e-6)


@pytest.mark.xfail(strict=True, reason="state that is not looked for")
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_or_is_refused(case: str) -> None:
    expected = run(CASES[case](), 0)
    try:
        found = run(CASES[case](), 2)
    except Fold3dError:
        return
    assert found == pytest.approx(expected, rel=1e-6)
