"""weight_versions="stashing" and "vertical_sync" (PipeDream) on a pipeline, against recursions written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fold3d
from fold3d.data_parallel.late.each_micro_batch import EachMicroBatch
from fold3d.data_parallel.late.weight_versions import WeightVersions
from fold3d.engine.engine import Engine
from fold3d.errors import CheckpointError, ConfigError
from tests.engine.test_without_flush import PP, Chain, inputs, sgd
from tests.helpers.ranks import RankError, RankPool

pytestmark = pytest.mark.dist

STEPS = 13
RATES = [0.05 / (1 + 0.2 * t) for t in range(STEPS)]
RULES = ("stashing", "vertical_sync")
WRITTEN_AFTER, FROZEN_AFTER, FROZEN = (4, 7), (5, 6), 1
"""Steps behind which `touch` writes all numbers, and behind which that of one stage is not trained."""
Found = tuple[list[float], list[float], list[float]]
BASE: dict[str, Any] = {"pp": PP, "segments": 1, "micro_batches": 1, "gradient_delay": 1, "flush": False}


def by_hand(rule: str, steps: int = STEPS, *, touched: bool = False) -> Found:
    """Returns the numbers at the end, and the norm and the loss of each micro-batch: all of it in plain floats.

    Args:
        touched: between steps as by `touch`, which writes the newest version that each stage has.
    """
    history = [[0.5 + 0.1 * k for k in range(PP)]]
    velocity = [0.0] * PP
    norms, losses = [], []
    for t in range(steps):
        behind = [PP - s if rule == "stashing" else PP for s in range(PP)]
        used = [history[max(t + 1 - n, 0)][s] for s, n in enumerate(behind)]
        values = [inputs(t, 1)[0].item()]
        for w in used:
            values.append(values[-1] * w + 0.1 * values[-1] * w * w)
        losses.append(values[-1] ** 2 / 2)
        back, gradient = values[-1], [0.0] * PP
        for k in reversed(range(PP)):
            gradient[k] = back * (values[k] + 0.2 * values[k] * used[k])
            back *= used[k] + 0.1 * used[k] ** 2
        trained = [not (touched and s == FROZEN and t - 1 in FROZEN_AFTER) for s in range(PP)]
        norms.append(sum(g * g for g, is_trained in zip(gradient, trained, strict=True) if is_trained) ** 0.5)
        numbers = list(history[-1])
        for s in range(PP):
            if trained[s]:
                velocity[s] = 0.6 * velocity[s] + gradient[s]
                numbers[s] -= RATES[t] * velocity[s]
            if touched and t + PP - 1 - s in WRITTEN_AFTER:  # the step in which this stage makes the update
                numbers[s] = 0.9 * numbers[s] + 0.01
        history.append(numbers)
    return history[-1], norms, losses


def make(rule: str, **changes: Any) -> Engine:
    config = fold3d.ParallelConfig(**(BASE | {"weight_versions": rule} | changes))
    return Engine(Chain(), config, optimizer=sgd, example={"x": inputs(0, 1)[0]})


def train(
    rule: str,
    steps: range = range(STEPS),
    *,
    looks_every: int = 0,
    start: Any = None,
    touches: bool = False,
    fault: Callable[[], None] | None = None,
    **changes: Any,
) -> tuple[Found, Any]:
    """Returns what `by_hand` returns, as fold3d reports it, PP steps late; and the state at the end."""
    torch.set_default_dtype(torch.float64)
    if fault is not None:
        fault()
    try:
        engine = make(rule, **changes)
        if start is not None:
            engine.load_state_dict(start)
        norms, losses = [], []
        for t in steps:
            assert engine.optimizer is not None
            engine.optimizer.param_groups[0]["lr"] = RATES[t]
            output = engine.step({"x": inputs(t, 1)[0]})
            losses.append(output.loss.item())
            norms.append(output.grad_norm.item())
            if looks_every and t % looks_every == 0:
                engine.evaluate({"x": inputs(0, 1)[0]})
                engine.state_dict()
            if touches:
                touch(engine, t)
        assert engine.finish_updates() is None, "a drain takes all"
        state = engine.state_dict()
        engine.close()
        return ([state["model"][f"links.{k}.w"].item() for k in range(PP)], norms, losses), state
    finally:
        torch.set_default_dtype(torch.float32)


def assert_is(found: Found, rule: str) -> None:
    numbers, norms, losses = found
    wanted = by_hand(rule)
    assert numbers == pytest.approx(wanted[0], abs=1e-12)
    assert norms == pytest.approx([0.0] * PP + wanted[1][:-PP], abs=1e-12)
    assert losses == pytest.approx([0.0] * PP + wanted[2][:-PP], abs=1e-12)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("rule", RULES)
def test_a_chain_is_the_recursion(ranks: RankPool, rule: str) -> None:
    assert by_hand("stashing")[0] != pytest.approx(by_hand("vertical_sync")[0], abs=1e-4)
    for found, _ in ranks.run(train, PP, rule):
        assert_is(found, rule)


@pytest.mark.parametrize("rule", RULES)
def test_evaluations_and_states_change_no_bit(ranks: RankPool, rule: str) -> None:
    """Also with drains before the pipeline is full, and after each step; what is reported is what it adds up to."""
    plain, state = ranks.run(train, PP, rule)[0]
    for every in (3, 1):
        looking, seen = ranks.run(train, PP, rule, looks_every=every)[0]
        assert looking[0] == plain[0]
        assert all(torch.equal(seen["late_gradients"][name], one) for name, one in state["late_gradients"].items())
        if every == 1:  # each drain tells of its step in the next one
            assert looking[2] == pytest.approx([0.0, *by_hand(rule)[2][:-1]], abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("half", [2, 6])
def test_a_state_goes_on_bit_for_bit(ranks: RankPool, rule: str, half: int) -> None:
    whole = ranks.run(train, PP, rule)[0][0]
    state = ranks.run(train, PP, rule, range(half))[0][1]
    again = ranks.run(train, PP, rule, range(half, STEPS), start=state)[0][0]
    assert again[0] == whole[0]
    del state["late_gradients"][f"links.0.w@{PP - 1}"]
    with pytest.raises(RankError, match=CheckpointError.__name__):
        ranks.run(train, PP, rule, range(half, STEPS), start=state)


def go_back(rule: str) -> tuple[list[Any], list[Any]]:
    """Returns the weights after some steps, and those after steps that were taken back."""
    torch.set_default_dtype(torch.float64)
    try:
        found = []
        for bad in (range(0), range(5, 8)):
            engine, state = make(rule), None
            for t in (*range(5), *bad, *range(5, STEPS)):
                if t == 5 and state is None:
                    state = engine.state_dict()
                elif t == 5:
                    engine.load_state_dict(state)
                    now = engine.state_dict()["model"]
                    assert all(torch.equal(now[name], one) for name, one in state["model"].items())
                engine.step({"x": inputs(t, 1)[0]})
            engine.finish_updates()
            weights = engine.state_dict()["model"]
            found.append([weights[f"links.{k}.w"].item() for k in range(PP)])
            engine.close()
        return found[0], found[1]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("rule", RULES)
def test_a_training_can_go_back_to_a_state(ranks: RankPool, rule: str) -> None:
    """What is in the pipeline was computed on the weights that are left."""
    for straight, back in ranks.run(go_back, PP, rule):
        assert back == straight


def touch(engine: Engine, step: int) -> None:
    """What callbacks do between steps: they write weights, through the parameters and past them, and freeze some."""
    engine.flush()
    for name, parameter in engine.owned.items():
        if step in WRITTEN_AFTER:
            with torch.no_grad():
                parameter.mul_(0.9)
            parameter.data.add_(0.01)
        parameter.requires_grad_(name != f"links.{FROZEN}.w" or step not in FROZEN_AFTER)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_done_to_weights_between_steps_is_of_the_newest_version(ranks: RankPool, rule: str) -> None:
    """Micro-batches that are in the pipeline know nothing of it."""
    wanted = by_hand(rule, touched=True)
    assert wanted[0] != pytest.approx(by_hand(rule)[0], abs=1e-3)
    for (numbers, norms, losses), _ in ranks.run(train, PP, rule, touches=True):
        assert numbers == pytest.approx(wanted[0], abs=1e-12)
        assert norms == pytest.approx([0.0] * PP + wanted[1][:-PP], abs=1e-12)
        assert losses == pytest.approx([0.0] * PP + wanted[2][:-PP], abs=1e-12)


def _points_at_the_newest() -> None:
    EachMicroBatch.turn_to = lambda sync, number, step_before: sync._versions.point(sync._versions.newest)  # type: ignore


def _points_at_nothing() -> None:
    WeightVersions.point = lambda versions, version: None  # type: ignore


def _overwrites_too_early() -> None:
    """The version that the next backward takes makes room, which is an action too early."""
    fill = WeightVersions.fill

    def wrong(versions: WeightVersions, bucket: Any) -> None:
        fill(versions, bucket)
        if versions.count > 1:
            versions._flats[bucket.number][versions.older(-1)].fill_(float("nan"))

    WeightVersions.fill = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", [_points_at_the_newest, _points_at_nothing, _overwrites_too_early])
def test_a_wrong_version_is_found(ranks: RankPool, fault: Callable[[], None], rule: str) -> None:
    with pytest.raises(AssertionError):
        assert_is(ranks.run(_faulty, PP, rule, fault)[0], rule)


def _faulty(rule: str, fault: Callable[[], None]) -> Found:
    """Trains with a fault, which is gone afterwards: the process is used again."""
    kept = [(EachMicroBatch, "turn_to"), (WeightVersions, "point"), (WeightVersions, "fill")]
    before = [(kind, name, kind.__dict__[name]) for kind, name in kept]
    try:
        return train(rule, fault=fault)[0]
    finally:
        for kind, name, value in before:
            setattr(kind, name, value)


@pytest.mark.parametrize("rule", RULES)
def test_the_memory_of_a_version_is_free_after_its_last_action(ranks: RankPool, rule: str) -> None:
    """NaN in it, from the backward of its micro-batch to the update that is put there, reaches nothing."""
    assert_is(ranks.run(_with_nan, PP, rule)[0], rule)


def _with_nan(rule: str) -> Found:
    done = EachMicroBatch.end_slice

    def after(sync: EachMicroBatch, values: Any) -> None:
        done(sync, values)
        versions = sync._versions
        assert versions is not None
        if versions.count > 1:  # where there is one, the update begins with it
            for flats in versions._flats:
                flats[versions.older(-1)].fill_(float("nan"))

    EachMicroBatch.end_slice = after  # type: ignore[method-assign]
    try:
        return train(rule)[0]
    finally:
        EachMicroBatch.end_slice = done  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flush": True}, "no effect with a flush"),
        ({"micro_batches": PP}, "is 4; set it to 1"),
        ({"gradient_delay": 0}, "gradient_delay=0; set gradient_delay=1"),
        ({"weight_versions": "naive"}, "must be one of 2bw, stashing, vertical_sync"),
        ({"delay_correction": "error_feedback"}, "not available with flush=False and weight_versions='stashing'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fold3d.ParallelConfig(**(BASE | {"weight_versions": "stashing"} | changes))


def test_replicas_and_clipping_are_refused() -> None:
    config = fold3d.ParallelConfig(**(BASE | {"weight_versions": "stashing"}))
    with pytest.raises(ConfigError, match="not available with dp=2"):
        config.resolve_dp(2 * PP)
    with pytest.raises(ConfigError, match="nobody knows the norm"):
        Engine(Chain(), config, optimizer=sgd, max_grad_norm=1.0)
