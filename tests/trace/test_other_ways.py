"""Models that decide by attributes, by sizes and by what they count to read what the recorded call did not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import SplitError
from fold3d.stage import call_guard
from fold3d.trace import Trace, trace
from tests.trace.chains import assert_equal, chained, ranks_of, whole

LONG = 6
"""Tokens."""


class Settings:
    """As a configuration: a plain object."""

    def __init__(self) -> None:
        self.reads = "nothing"


class Layer(nn.Linear):
    """Keeps the shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Reader(nn.Module):
    """Reads behind its four blocks what it is told to: "nothing", "embedded", or "first", what the first returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(4))
        self.config = Settings()
        self.reads, self.when_long, self.in_evaluation, self.count, self.after = "nothing", "", "", 0, 1 << 30
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        states = [self.embedding(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        self.count += 1
        reads = [self.reads, self.config.reads, self.when_long if x.shape[1] >= LONG else ""]
        reads += ["" if self.training else self.in_evaluation, "first" if self.count > self.after else ""]
        y = states[-1]
        if "embedded" in reads:
            y = y + states[0]
        if "first" in reads:
            y = y * states[1]
        return y.square().mean()


def batch(length: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randint(0, 9, (2, length), generator=torch.Generator().manual_seed(length))}


def halves(model: nn.Module) -> tuple[Trace, list[Any]]:
    recorded = trace(model, example=batch())
    return recorded, ranks_of(model, recorded, [(0, 2), (2, 4)], 2)


def set_on(models: list[nn.Module], change: Callable[[Any], None]) -> None:
    for model in models:
        change(model)


@pytest.mark.parametrize("reads", ["embedded", "first"])
@pytest.mark.parametrize("place", ["model", "config"])
def test_an_attribute_may_be_set_between_calls(reads: str, place: str) -> None:
    model = Reader()
    recorded, ranks = halves(model)
    models = [model, *(rank._model for rank in ranks)]
    for now in ("nothing", reads, "nothing", reads):
        set_on(models, lambda one, now=now: setattr(one if place == "model" else one.config, "reads", now))
        assert_equal(chained(ranks, recorded, 2, batch()), whole(model, batch()))


@pytest.mark.parametrize("reads", ["embedded", "first"])
def test_evaluation_may_read_more(reads: str) -> None:
    model = Reader()
    model.in_evaluation = reads
    recorded, ranks = halves(model)
    models = [model, *(rank._model for rank in ranks)]
    for trains in (True, False, True, False):
        set_on(models, lambda one, trains=trains: one.train(trains))
        assert_equal(chained(ranks, recorded, 2, batch()), whole(model, batch()))


@pytest.mark.parametrize("reads", ["embedded", "first"])
def test_sizes_that_decide_are_refused(reads: str) -> None:
    model = Reader()
    model.when_long = reads
    recorded, ranks = halves(model)
    for length in (3, 4, LONG - 1):
        assert_equal(chained(ranks, recorded, 2, batch(length)), whole(model, batch(length)))
    read = "embedding" if reads == "embedded" else "layers.0"
    with pytest.raises(SplitError, match=f"with these sizes, or by what it counts, .* reads what '{read}' returned"):
        chained(ranks, recorded, 2, batch(LONG))


def test_counts_that_decide_are_refused() -> None:
    model = Reader()
    model.after = 3
    recorded, ranks = halves(model)
    for _ in range(3):
        assert_equal(chained(ranks, recorded, 2, batch()), whole(model, batch()))
    with pytest.raises(SplitError, match="or by what it counts"):
        chained(ranks, recorded, 2, batch())


def test_a_counter_is_not_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reader()
    recorded, ranks = halves(model)
    recordings: list[int] = []

    def counted(*args: Any, **named: Any) -> Trace:
        recordings.append(1)
        return original(*args, **named)

    original = call_guard.trace_call
    monkeypatch.setattr(call_guard, "trace_call", counted)
    for _ in range(4):
        chained(ranks, recorded, 2, batch())
    assert len(recordings) <= len(ranks), "once each, until it is known for a counter"
    recordings.clear()
    for number in range(40):
        set_on([rank._model for rank in ranks], lambda one, number=number: setattr(one, "reads", f"{number}"))
        chained(ranks, recorded, 2, batch())
    assert len(recordings) <= 2 * len(ranks) * call_guard._MOST


def test_what_is_no_number_without_a_reason_is_the_models() -> None:
    model = Reader()
    with torch.no_grad():
        model.layers[3].weight.fill_(torch.nan)
    recorded, ranks = halves(model)
    assert chained(ranks, recorded, 2, batch())[0].isnan()


def test_hooks_of_the_users_see_numbers() -> None:
    model = Reader()
    recorded, ranks = halves(model)
    seen: list[bool] = []
    for rank in ranks:
        rank._model.layers[0].register_forward_hook(lambda _, __, output: seen.append(bool(output.isfinite().all())))
    chained(ranks, recorded, 2, batch())
    assert seen and all(seen)


def doubled(module: nn.Module, gradients: Any, _: Any) -> Any:
    """A backward hook."""
    return tuple(None if one is None else 2 * one for one in gradients)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_backward_hooks_run_or_are_refused(number: int) -> None:
    model = Reader()
    model.layers[number].register_full_backward_hook(doubled)
    recorded, ranks = halves(model)
    if number == 1:
        with pytest.raises(SplitError, match=r"'layers.1' has a backward hook, which would not be called"):
            chained(ranks, recorded, 2, batch())
    else:
        assert_equal(chained(ranks, recorded, 2, batch()), whole(model, batch()))


def test_gradients_are_changed_by_hooks_on_results() -> None:
    def watch(module: nn.Module, given: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: 2 * gradient)

    model = Reader()
    model.layers[1].register_forward_hook(watch)
    recorded, ranks = halves(model)
    assert_equal(chained(ranks, recorded, 2, batch()), whole(model, batch()))


class Padded(nn.Module):
    """torch's encoder: in evaluation its layers take nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
        self.double()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out.square().mean()


def test_nested_tensors_are_refused() -> None:
    model = Padded()
    padding = torch.tensor([[False, False, False], [False, False, True]])
    given = {"x": torch.randn(2, 3, 4, dtype=torch.float64), "padding": padding}
    recorded = trace(model, example=given)
    (rank,) = ranks_of(model, recorded, [(0, 1), (1, 2)], 1)
    rank._model.eval()
    with torch.no_grad(), pytest.raises(SplitError, match=r"returned a nested tensor.*enable_nested_tensor=False"):
        rank.run(0, lambda: rank._model(**given), [], None)
