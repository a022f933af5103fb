"""State that a loss function sets before the model's call, wherever it keeps it.

In a model that is cut several micro-batches are under way, and what one sets another sets again before it is read. Each
case must equal the plain loop over micro-batches, or be refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import BaseModelOutput

from fold3d import Engine, ParallelConfig
from fold3d.errors import Fold3dError

MICRO_BATCHES = 3
Loss = Callable[[Any, dict[str, Any]], Tensor]
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
GLOBAL = 1.0


class Net(nn.Module):
    """Four layers, fp64 [rows, 4] -> [rows, 1], that reads and keeps attributes of its own."""

    factor = 1.0
    aux: Any = 0.0
    parts: Any = ()
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2))
        self.plain = torch.ones(())
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4))
        self.head = nn.Linear(4, 1)
        self.config = SimpleNamespace(temperature=1.0)
        self.collected: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux, self.parts = 0.0, []
        for layer in self.layers:
            x = x + layer(x).tanh()
            self.parts.append(x)
        self.aux = self.aux + x.square().mean()
        self.collected = self.collected + x.detach().mean()
        out: Tensor = self.head(x * self.factor * CONTEXT.get() / self.config.temperature)
        return out


class SetsTheSame:
    """The first micro-batch sets what was there already, so it does not look like a change."""

    weight = 1.0

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        self.weight = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * self.weight


class ResetsAndAdds:
    """Sums up over one micro-batch."""

    def __init__(self) -> None:
        self.total: Any = 0.0

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        self.total = 0.0
        out = model(batch["x"])
        self.total = self.total + out.square().mean() * batch["w"]
        return self.total  # type: ignore[no-any-return]


class Forgets:
    """Takes away behind the call what it has set before."""

    last: Any = None

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        self.last = batch["w"]
        out: Tensor = model(batch["x"])
        loss = out.square().mean() * self.last
        self.last = None
        return loss


class Slots:
    __slots__ = ("weight",)

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        self.weight = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * self.weight


class OfTheClass:
    weight = 1.0

    @classmethod
    def loss(cls, model: Any, batch: dict[str, Any]) -> Tensor:
        cls.weight = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * cls.weight


class Appends:
    """To a list that is too long to copy it for every micro-batch."""

    def __init__(self, length: int) -> None:
        self.weights = [0.0] * length
        self.array = np.zeros(2)

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        self.weights.append(batch["w"])
        self.array[0] = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * self.weights[-1] * self.array[0]


class Meter:
    def __init__(self) -> None:
        self.weight, self.count = 1.0, 0

    def update(self, weight: float) -> None:
        self.weight, self.count = weight, self.count + 1


class HasAMeter:
    def __init__(self) -> None:
        self.meter = Meter()

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        self.meter.update(batch["w"])
        out: Tensor = model(batch["x"])
        return out.square().mean() * self.meter.weight * self.meter.count


def in_a_closure() -> Loss:
    state: dict[str, float] = {}
    weight = 1.0

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        nonlocal weight
        state["w"] = weight = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * state["w"] * weight

    return loss


def in_a_partial() -> Loss:
    def loss(state: dict[str, float], model: Any, batch: dict[str, Any]) -> Tensor:
        state["w"] = batch["w"]
        out: Tensor = model(batch["x"])
        return out.square().mean() * state["w"]

    return functools.partial(loss, {})


def in_a_global(model: Any, batch: dict[str, Any]) -> Tensor:
    global GLOBAL
    GLOBAL = batch["w"]
    out: Tensor = model(batch["x"])
    return out.square().mean() * GLOBAL


def in_the_model(model: Any, batch: dict[str, Any]) -> Tensor:
    model.factor = batch["w"]
    model.config.temperature = 1 + batch["w"]
    out: Tensor = model(batch["x"])
    return out.square().mean()


def in_a_buffer(model: Any, batch: dict[str, Any]) -> Tensor:
    model.seen.mul_(1 + batch["w"])
    model.plain.add_(batch["w"])
    out: Tensor = model(batch["x"] * model.seen[0])
    return out.square().mean() * model.seen.sum() * model.plain


def in_a_context_variable(model: Any, batch: dict[str, Any]) -> Tensor:
    token = CONTEXT.set(batch["w"])
    out: Tensor = model(batch["x"])
    CONTEXT.reset(token)
    return out.square().mean()


def toggles(model: Any, batch: dict[str, Any]) -> Tensor:
    model.eval()
    out: Tensor = model(batch["x"])
    model.train()
    return out.square().mean()


def reads_what_the_model_keeps(model: Any, batch: dict[str, Any]) -> Tensor:
    out = model(batch["x"])
    total: Tensor = out.square().mean() + model.aux
    return total


def reads_what_each_layer_returned(model: Any, batch: dict[str, Any]) -> Tensor:
    out = model(batch["x"])
    total: Tensor = out.square().mean() + sum(part.square().mean() for part in model.parts)
    return total


def collects_in_the_model(model: Any, batch: dict[str, Any]) -> Tensor:
    model.collected = batch["w"]
    out: Tensor = model(batch["x"])
    return out.square().mean() * model.collected


def with_a_switch(model: Any, batch: dict[str, Any]) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        out: Tensor = model(batch["x"])
        return out.square().mean() * (1 + torch.backends.cuda.flash_sdp_enabled())


def run(function: Loss, segments: int) -> float:
    torch.manual_seed(0)
    model = Net().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5 if function is toggles else 0.0
    torch.manual_seed(1)
    batches = [{"x": torch.randn(2, 4, dtype=torch.float64), "w": float(i + 1)} for i in range(MICRO_BATCHES)]
    if not segments:
        return sum(function(model, batch).item() for batch in batches)
    engine = Engine(model, ParallelConfig(segments=segments, blocks="layers", micro_batches=MICRO_BATCHES))
    try:
        return engine.run(batches, function).item()
    finally:
        engine.close()


CASES: dict[str, Callable[[], Loss]] = {
    "the same value": SetsTheSame,
    "reset and added to": ResetsAndAdds,
    "taken away again": Forgets,
    "slots": lambda: Slots().loss,
    "a class": lambda: OfTheClass.loss,
    "a list": lambda: Appends(3),
    "a long list": lambda: Appends(5000),
    "an attribute of an attribute": HasAMeter,
    "a closure": in_a_closure,
    "a partial": in_a_partial,
    "a global variable": lambda: in_a_global,
    "attributes of the model": lambda: in_the_model,
    "a buffer in place": lambda: in_a_buffer,
    "a context variable": lambda: in_a_context_variable,
    "eval and train": lambda: toggles,
    "what the model keeps": lambda: reads_what_the_model_keeps,
    "what the model adds to": lambda: collects_in_the_model,
    "a switch of torch's": lambda: with_a_switch,
}


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_loop(case: str, segments: int) -> None:
    expected = run(CASES[case](), 0)
    assert run(CASES[case](), segments) == pytest.approx(expected, rel=1e-6)
    assert torch.backends.cuda.flash_sdp_enabled() and CONTEXT.get() == 1.0


def test_results_of_other_chunks_in_an_attribute_of_the_model() -> None:
    expected = run(reads_what_each_layer_returned, 0)
    assert run(reads_what_each_layer_returned, 1) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(Fold3dError, match="computed from what the attribute parts keeps, which other ranks have"):
        run(reads_what_each_layer_returned, 2)


def test_weights_that_are_frozen_for_a_micro_batch_are_refused() -> None:
    def freezes(model: Any, batch: dict[str, Any]) -> Tensor:
        model.head.requires_grad_(batch["w"] < 2)
        out: Tensor = model(batch["x"])
        return out.square().mean()

    run(freezes, 1)
    with pytest.raises(Fold3dError, match="changes requires_grad of weights"):
        run(freezes, 2)


class Noisy(nn.Module):
    """Draws in its forward, as a variational autoencoder does, and notes what."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        noise = torch.randn_like(x)
        self.drawn.append(noise[0, 0].detach())
        return x + noise


@pytest.mark.parametrize("segments", [1, 2])
def test_the_loss_draws_other_numbers_than_the_model(segments: int) -> None:
    """It drew the same again: the noise of a diffusion model's target was that of its input."""
    model, behind = Noisy(), list[float]()

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        out = model(batch["x"])
        noise = torch.randn_like(out)
        behind.append(noise[0, 0].item())
        total: Tensor = (out - noise).square().mean()
        return total

    engine = Engine(model, ParallelConfig(segments=segments, blocks="layers", micro_batches=MICRO_BATCHES))
    batches = [{"x": torch.randn(2, 4, dtype=torch.float64)} for _ in range(MICRO_BATCHES)]
    engine.run(batches, loss)
    engine.close()
    assert len(behind) == MICRO_BATCHES and not {one.item() for one in model.drawn if not one.is_meta} & set(behind)


def test_a_step_that_fails_lets_go_of_all_loss_functions() -> None:
    ended = list[float]()

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        try:
            out: Tensor = model(batch["x"])
            if batch["w"] == 1:
                raise ValueError("a mistake of the user's")
            return out.square().mean()
        finally:
            ended.append(batch["w"])

    with pytest.raises(Fold3dError, match="a mistake of the user's"):
        run(loss, 2)
    assert sorted(ended) == [1.0, 2.0, 3.0]


def test_python_numbers_go_on_behind_the_step() -> None:
    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        weight = random.random()
        out: Tensor = model(batch["x"])
        return out.square().mean() * weight

    random.seed(3)
    expected = run(loss, 0), random.random()
    random.seed(3)
    assert (run(loss, 2), random.random()) == pytest.approx(expected, rel=1e-6)


def test_hooks_for_saved_tensors_around_the_call() -> None:
    """They were taken for a checkpoint around two blocks."""

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = model(batch["x"])
            return out.square().mean()

    assert run(loss, 2) == pytest.approx(run(loss, 0), rel=1e-6)


@dataclass
class Output:
    """What a model returns, in attributes of an object."""

    hidden: Any
    more: Any


class ReturnsObjects(nn.Module):
    """Returns a term of each layer, for the loss, in an object in an object, or beside the entries of a dictionary."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        terms = {}
        for number, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            terms[number] = x.square().mean()
        if self.way == "attributes of an object":
            return Output(x, Output(None, list(terms.values())))
        found = BaseModelOutput(last_hidden_state=x)
        found.more = SimpleNamespace(more=list(terms.values()))  # type: ignore[attr-defined]
        found.hidden = x  # type: ignore[attr-defined]
        return found


@pytest.mark.parametrize("way", ["attributes of an object", "an attribute of a dictionary"])
def test_tensors_in_objects_that_the_model_returns(way: str) -> None:
    """The recording did not see that the loss function may read them: the loss was NaN."""

    def sum_of_terms(model: Any, batch: dict[str, Any]) -> Tensor:
        out: Any = model(batch["x"])
        total: Tensor = out.hidden.square().mean() + sum(out.more.more)
        return total

    def train(segments: int) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        model = ReturnsObjects(way)
        config = ParallelConfig(micro_batches=2, segments=segments, blocks="layers")
        batches = [{"x": torch.randn(3, 4, dtype=torch.float64)} for _ in range(2)]
        with contextlib.closing(Engine(model, config)) as engine:
            loss = engine.run(batches, sum_of_terms).item()
            first = model.layers[0].weight
            assert isinstance(first, Tensor) and first.grad is not None
            return loss, first.grad.clone()

    torch.testing.assert_close(train(2), train(1), rtol=1e-12, atol=1e-14)
