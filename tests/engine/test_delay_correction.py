"""delay_correction in one process, against recursions written out by hand in plain floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fold3d
from fold3d.data_parallel.late.weight_versions import WeightVersions
from fold3d.data_parallel.optimizer.bucket_optimizer import BucketOptimizer
from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError, RankError
from tests.engine.test_late_gradients import CURVATURES, FIRST, RATES, STEPS, Parabola, step, weight

WAYS = ("error_feedback", "predict")
DECAY = 0.05


@pytest.fixture
def built() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(way: str, optimizer: Any) -> Engine:
        config = fold3d.ParallelConfig(gradient_delay=1, delay_correction=way)
        engines.append(Engine(Parabola(), config, optimizer=optimizer))
        return engines[-1]

    torch.set_default_dtype(torch.float64)
    yield make
    for engine in engines:
        engine.close()


def sgd(parameters: list[torch.nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0, momentum=0.6, weight_decay=DECAY)


def adamw(parameters: list[torch.nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1.0, weight_decay=DECAY, eps=1e-4)


class Momentum:
    """SGD's update of one number, in floats."""

    velocity: float | None = None

    def __call__(self, w: float, gradient: float, rate: float) -> float:
        gradient += DECAY * w
        self.velocity = gradient if self.velocity is None else 0.6 * self.velocity + gradient
        return rate * self.velocity


class Adam:
    """AdamW's."""

    first = second = 0.0
    count = 0

    def __call__(self, w: float, gradient: float, rate: float) -> float:
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        scale = math.sqrt(self.second / (1 - 0.999**self.count)) + 1e-4
        return rate * DECAY * w + rate * self.first / (1 - 0.9**self.count) / scale


OPTIMIZERS = [(sgd, Momentum), (adamw, Adam)]


def by_hand(way: str, update: Any) -> list[float]:
    """Returns the number after each step, and after the last update."""
    seen, last, before, waiting = [], FIRST, 0.0, None
    now = FIRST
    for t in range(STEPS + 1):
        gradient = CURVATURES[t % STEPS] * (2 * now - last if way == "predict" else now)
        last = now
        if waiting is not None:
            u = update(now, *waiting)
            now -= 2 * u - before if way == "error_feedback" else u
            before = u
        waiting = gradient, RATES[t % STEPS]
        seen.append(now)
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("make", "update"), OPTIMIZERS)
def test_it_is_its_recursion(built: Any, way: str, make: Any, update: Any) -> None:
    engine = built(way, make)
    wanted = by_hand(way, update())
    for t in range(STEPS):
        step(engine, t)
        assert weight(engine) == pytest.approx(wanted[t], abs=1e-12)
    engine.finish_updates()
    assert weight(engine) == pytest.approx(wanted[STEPS], abs=1e-12)
    plain = by_hand("none", update())
    assert abs(plain[-1] - wanted[-1]) > 1e-3, "it changes something"


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_and_states_change_no_bit_and_a_state_goes_on(built: Any, way: str) -> None:
    engine, state = built(way, adamw), None
    for t in range(STEPS):
        step(engine, t)
        engine.evaluate({"a": torch.tensor([2.0])})
        if t == 6:
            state = engine.state_dict()
    wanted, again, other = weight(engine), built(way, adamw), built(way, adamw)
    plain = built(way, adamw)
    for t in range(STEPS):
        step(plain, t)
    assert weight(plain) == wanted
    step(again, 5), step(again, 5)  # what it has of its own does not count
    again.load_state_dict(state)
    kept = [state["optimizer"]["w"].pop("update_before", None)]
    kept += [state["late_gradients"].pop(f"{name}@update1", None) for name in ("w", "unused")]
    assert any(one is not None for one in kept)
    other.load_state_dict(state)
    for t in range(7, STEPS):
        step(again, t)
        step(other, t)
    assert weight(again) == wanted
    assert weight(other) != wanted, "what the correction keeps is part of the state"


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_dropped_leaves_what_the_correction_keeps(built: Any, way: str, raises: bool) -> None:
    def train(drops: bool) -> tuple[float, float]:
        engine, state = built(way, sgd), None
        for t in range(STEPS):
            if t == 6:
                with pytest.raises(RankError) if drops and raises else nullcontext():
                    _drop(engine, raises=raises) if drops else None
                state = engine.state_dict()
                with torch.no_grad():
                    engine.model.w.mul_(0.9)
            step(engine, t)
        other = built(way, sgd)
        other.load_state_dict(state)
        with torch.no_grad():
            other.model.w.mul_(0.9)
        for t in range(6, STEPS):
            step(other, t)
        return weight(engine), weight(other)

    wanted = train(False)
    assert wanted[0] == wanted[1] and train(True) == pytest.approx(wanted, rel=1e-14)


def _drop(engine: Engine, *, raises: bool) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = model(**batch)["loss"]
        if raises:
            raise ValueError("a sample that cannot be")
        return value

    engine.run([{"a": torch.tensor([100.0])}], loss)
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()


def test_predicted_weights_are_seen_by_steps_only(built: Any) -> None:
    engine = built("predict", sgd)
    seen = []
    engine.model.register_forward_pre_hook(lambda module, *_: seen.append(module.w.item()))
    for t in range(4):
        step(engine, t)
    engine.evaluate({"a": torch.tensor([1.0])})
    wanted = by_hand("predict", Momentum())
    assert seen[:-1] == pytest.approx([FIRST, FIRST, *(2 * wanted[t] - wanted[t - 1] for t in (1, 2))], abs=1e-12)
    assert seen[-1] == weight(engine) == pytest.approx(wanted[3], abs=1e-12)


def test_what_is_written_between_steps_is_predicted_from(built: Any) -> None:
    """Also before the first update, and where an update has come since."""
    engine = built("predict", sgd)
    seen, wanted, last = [], [], None
    engine.model.register_forward_pre_hook(lambda module, *_: seen.append(module.w.item()))
    for t in range(5):
        before = weight(engine)
        step(engine, t)
        updated = weight(engine)
        last = updated - before
        with torch.no_grad():
            engine.model.w.add_(0.25)
        engine.state_dict()
        wanted.append(updated + 0.25 + last)
    assert seen[1:] == pytest.approx(wanted[:-1], abs=1e-12)


def _predicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightVersions, "predict", lambda versions, bucket: None)


def _feeds_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    once = BucketOptimizer._step_feeding_back

    def twice(part: BucketOptimizer, given: Any) -> None:
        once(part, given)
        once(part, given)

    monkeypatch.setattr(BucketOptimizer, "_step_feeding_back", twice)


@pytest.mark.parametrize(("way", "fault"), [("predict", _predicts_nothing), ("error_feedback", _feeds_back_twice)])
def test_a_fault_is_found(built: Any, monkeypatch: pytest.MonkeyPatch, way: str, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_it_is_its_recursion(built, way, sgd, Momentum)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delay_correction": "nesterov"}, "must be one of none, error_feedback, predict"),
        ({"gradient_delay": 0}, "no effect with gradient_delay=0"),
        ({"offload_optimizer": True}, "not available with offload_optimizer=True"),
        ({"flush": False, "pp": 2, "segments": 1, "micro_batches": 2}, "'predict' is not available with flush=False"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fold3d.ParallelConfig(**({"gradient_delay": 1, "delay_correction": "predict"} | changes))
