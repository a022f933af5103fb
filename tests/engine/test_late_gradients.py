"""gradient_delay=1 in one process, against recursions written out by hand: W(t+1) = W(t) - update(g(W(t-1)))."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fold3d
from fold3d.data_parallel import DpSync
from fold3d.data_parallel.late.late_gradients import LateGradients
from fold3d.data_parallel.optimizer.bucket_optimizer import BucketOptimizer, Settings
from fold3d.engine.engine import Engine
from fold3d.errors import CheckpointError, ConfigError, RankError

STEPS = 12
RATES = [0.3 / (1 + t) for t in range(STEPS)]
CURVATURES = [0.5 + 0.25 * (t % 3) for t in range(STEPS)]
FIRST = 2.0


class Parabola(nn.Module):
    """Its loss is a/2 w^2, with the gradient a w; `unused` is read by batches with a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([FIRST], dtype=torch.float64))
        self.unused = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def forward(self, a: Tensor, reads: bool = False) -> dict[str, Tensor]:
        """Returns the loss for curvatures [1]."""
        loss = (a * self.w.square() / 2).sum()
        return {"loss": loss + self.unused.sum() if reads else loss}


@pytest.fixture
def built() -> Iterator[Any]:
    """Makes engines that are closed at the end."""
    engines: list[Engine] = []

    def make(optimizer: Any, clip: float | None = None, **changes: Any) -> Engine:
        config = fold3d.ParallelConfig(**({"gradient_delay": 1} | changes))
        engines.append(Engine(Parabola(), config, optimizer=optimizer, max_grad_norm=clip))
        return engines[-1]

    torch.set_default_dtype(torch.float64)
    yield make
    for engine in engines:
        engine.close()


def step(engine: Engine, t: int, **others: Any) -> float:
    """Takes step t at its rate; returns the norm that it reports."""
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] = RATES[t]
    output = engine.step({"a": torch.tensor([CURVATURES[t]]), **others})
    return output.grad_norm.item()


def weight(engine: Engine) -> float:
    engine.flush()
    return engine.owned["w"].item()


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0)


def test_gradients_and_rates_are_those_of_the_step_before(built: Any) -> None:
    engine = built(sgd)
    before, now, norms = 0.0, FIRST, [0.0]  # the gradient that waits, and the weight
    for t in range(STEPS):
        assert step(engine, t) == pytest.approx(norms[-1], abs=1e-13)
        gradient = CURVATURES[t] * now
        now, before = now - (RATES[t - 1] * before if t else 0.0), gradient
        norms.append(abs(gradient))
        assert weight(engine) == pytest.approx(now, abs=1e-12)
    norm = engine.finish_updates()
    assert norm.item() == pytest.approx(norms[-1], abs=1e-13)
    assert weight(engine) == pytest.approx(now - RATES[-1] * before, abs=1e-12)
    assert engine.finish_updates() is None, "nothing is left"


def test_clipping_is_that_of_the_gradient_that_is_taken(built: Any) -> None:
    engine = built(sgd, clip=0.4)
    waiting, now = 0.0, FIRST
    for t in range(STEPS):
        step(engine, t)
        taken = waiting * min(1.0, 0.4 / (abs(waiting) + 1e-6))
        waiting, now = CURVATURES[t] * now, now - (RATES[t - 1] * taken if t else 0.0)
        assert weight(engine) == pytest.approx(now, abs=1e-12)


def _norm_of_this_step(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = DpSync._sum_norm

    def wrong(sync: DpSync) -> Tensor:
        assert sync.late is not None
        sync.late.turn()
        try:
            return measure(sync)
        finally:
            sync.late.turn()

    monkeypatch.setattr(DpSync, "_sum_norm", wrong)


def _gradients_of_this_step(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = LateGradients.keep

    def wrong(late: LateGradients, settings: Any, gathers: Any) -> None:
        keep(late, settings, gathers)
        late.turn()

    monkeypatch.setattr(LateGradients, "keep", wrong)


def _settings_of_this_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BucketOptimizer,
        "step",
        lambda part, gradients, settings, ahead=None, step=BucketOptimizer.step: step(
            part, gradients, Settings.of(part._optimizer, settings.coefficient)
        ),
    )


@pytest.mark.parametrize("fault", [_norm_of_this_step, _gradients_of_this_step, _settings_of_this_step])
def test_what_belongs_to_another_step_is_found(built: Any, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_clipping_is_that_of_the_gradient_that_is_taken(built)


def test_momentum_counts_late_gradients(built: Any) -> None:
    engine = built(lambda parameters: SGD(parameters, lr=1.0, momentum=0.7))
    waiting, now, velocity = None, FIRST, 0.0
    for t in range(STEPS):
        step(engine, t)
        gradient = CURVATURES[t] * now
        if waiting is not None:
            velocity = 0.7 * velocity + waiting
            now -= RATES[t - 1] * velocity
        waiting = gradient
        assert weight(engine) == pytest.approx(now, abs=1e-12)


def test_what_was_not_used_is_not_stepped(built: Any) -> None:
    """Weight decay would show a step that should not be: the parameter is read in step 1 alone."""
    engine = built(lambda parameters: AdamW(parameters, lr=0.1, weight_decay=0.5))
    seen = []
    for t in range(4):
        step(engine, t, reads=t == 1)
        engine.flush()
        seen.append(engine.owned["unused"].item())
    assert seen[0] == seen[1] == 1.0
    assert seen[2] < 1.0
    assert seen[3] == seen[2]


def test_a_step_that_is_not_taken_leaves_what_waits(built: Any) -> None:
    engine, other = built(sgd), built(sgd)
    for t in range(STEPS):
        step(engine, t)
        step(other, t)
        if t == 3:
            loss = {"a": torch.tensor([100.0])}
            other.run([loss], lambda model, batch: model(**batch)["loss"])
            other.grad_norm()
            other.optimizer.zero_grad()
    assert weight(other) == weight(engine)


def test_a_state_is_that_between_steps(built: Any) -> None:
    """Before the optimizer's step it would have the wrong gradients; behind one that is dropped it has what waits."""
    engine, other = built(sgd), built(sgd)
    for t in range(5):
        step(engine, t)
    state = engine.state_dict()
    engine.run([{"a": torch.tensor([100.0])}], lambda model, batch: model(**batch)["loss"])
    for call in (
        engine.state_dict,
        engine.late_gradients,
        engine.finish_updates,
        partial(engine.load_state_dict, state),
    ):
        with pytest.raises(ConfigError, match=r"is that between two steps, .* call optimizer.step\(\), or"):
            call()
    engine.optimizer.zero_grad()
    dropped = engine.state_dict()
    assert all(torch.equal(dropped["late_gradients"][name], one) for name, one in state["late_gradients"].items())
    step(other, 0)
    other.load_state_dict(dropped)
    for t in range(5, STEPS):
        step(engine, t)
        step(other, t)
    assert weight(other) == weight(engine)


def test_evaluating_and_reading_states_changes_no_bit(built: Any) -> None:
    engine, other = built(sgd, clip=0.4), built(sgd, clip=0.4)
    for t in range(STEPS):
        assert step(engine, t) == step(other, t)
        if t % 3 == 0:
            other.evaluate({"a": torch.tensor([1.0])})
            other.state_dict()
        assert weight(other) == weight(engine)


def test_a_state_has_what_waits(built: Any) -> None:
    engine = built(sgd, clip=0.4)
    for t in range(5):
        step(engine, t)
    state = engine.state_dict()
    assert set(state["late_gradients"]) == {"w"}, "what was not used has no gradient"
    assert state["late_settings"][0]["lr"] == RATES[4]
    for t in range(5, STEPS):
        step(engine, t)
    other = built(sgd, clip=0.4)
    step(other, 0)
    other.load_state_dict(state)
    for t in range(5, STEPS):
        step(other, t)
    assert weight(other) == weight(engine)
    exact = built(sgd, gradient_delay=0)
    step(exact, 0)
    with pytest.raises(CheckpointError, match="gradient_delay=1"):
        exact.load_state_dict(state)
    del state["late_gradients"], state["late_settings"]
    other.load_state_dict(state)
    assert other.finish_updates() is None, "a state without them leaves nothing that waits"


def test_no_delay_needs_nothing_of_it(built: Any) -> None:
    engine = built(sgd, gradient_delay=0)
    step(engine, 0)
    assert weight(engine) == FIRST - RATES[0] * CURVATURES[0] * FIRST
    assert "late_gradients" not in engine.state_dict()
    assert engine.finish_updates() is None


@pytest.mark.parametrize("value", [2, -1, True, "1", 0.5])
def test_other_delays_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="gradient_delay="):
        fold3d.ParallelConfig(gradient_delay=value)


def test_what_does_not_go_with_it_is_refused(built: Any) -> None:
    with pytest.raises(ConfigError, match="serial"):
        fold3d.ParallelConfig(gradient_delay=1, dp_sync="serial")
    with pytest.raises(ConfigError, match="fp16"):
        Engine(Parabola(), fold3d.ParallelConfig(gradient_delay=1), scaler=torch.amp.GradScaler("cpu"))
    engine = built(sgd)
    with pytest.raises(RankError, match="reads_gradients=False"):
        engine.run([{"a": torch.ones(1)}], lambda model, batch: model(**batch)["loss"], reads_gradients=True)
    without = built(None)
    with pytest.raises(RankError, match="attach one"):
        without.run([{"a": torch.ones(1)}], lambda model, batch: model(**batch)["loss"])


def test_gradients_that_wait_cannot_be_read(built: Any) -> None:
    engine = built(sgd)
    engine.run([{"a": torch.ones(1)}], lambda model, batch: model(**batch)["loss"])
    with pytest.raises(ConfigError, match=r"w\.grad was read or changed"):
        engine.owned["w"].grad.norm()  # type: ignore[union-attr]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_that_fails_leaves_no_trace(built: Any, delay: int) -> None:
    """Whoever catches the error goes on; late gradients are those of the step before it."""

    def trained(fails: bool) -> float:
        engine = built(partial(SGD, lr=0.1), gradient_delay=delay, micro_batches=2)

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            if batch["a"] == 5:
                raise ValueError("a bad sample")
            value: Tensor = model(**batch)["loss"]
            return value

        for a in (1.0, 2.0, 5.0, 3.0, 4.0) if fails else (1.0, 2.0, 3.0, 4.0):
            batches = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([a])}]
            if a == 5:
                with pytest.raises(RankError, match="a bad sample"):
                    engine.run(batches, loss)
                continue
            engine.run(batches, loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.finish_updates()
        return float(engine.state_dict()["model"]["w"])

    assert trained(True) == trained(False)
