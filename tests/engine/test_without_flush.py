"""flush=False on a pipeline of several ranks, against the recursion written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import fold3d
from fold3d.data_parallel.gradients import clip_coefficient
from fold3d.data_parallel.late.weight_versions import WeightVersions
from fold3d.data_parallel.late.without_flush import WithoutFlush
from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError, Fold3dError
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

PP, STEPS, CLIP = 4, 9, 0.04
RATES = [0.2 / (1 + t) for t in range(STEPS)]


class Link(nn.Module):
    """Multiplies by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5 + 0.1 * number, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 1] -> the same shape; the square makes each gradient depend on the number."""
        return x * self.w + 0.1 * x * self.w.square()


class Chain(nn.Module):
    """A chain of numbers, one for each stage, whose loss is the mean square of what comes out."""

    def __init__(self, links: int = PP) -> None:
        super().__init__()
        self.links = nn.ModuleList(Link(number) for number in range(links))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the loss of inputs [batch, 1]."""
        for link in self.links:
            x = link(x)
        return {"loss": x.square().mean() / 2}


def inputs(step: int, m: int) -> list[Tensor]:
    """Returns the micro-batches of a step, [1, 1] each."""
    return [torch.tensor([[1.0 + 0.3 * ((7 * step + 3 * i) % 5)]], dtype=torch.float64) for i in range(m)]


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0, momentum=0.6)


def by_hand(counts: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Returns the numbers at the end, and the norm and the loss of each step: all of it in plain floats."""
    numbers = [0.5 + 0.1 * k for k in range(PP)]
    velocity, waiting = [0.0] * PP, None
    norms, losses = [], []
    for t, m in enumerate(counts):
        gradient, loss = [0.0] * PP, 0.0
        for one in inputs(t, m):
            values = [one.item()]
            for w in numbers:
                values.append(values[-1] * w + 0.1 * values[-1] * w * w)
            loss += values[-1] ** 2 / 2 / m
            back = values[-1] / m
            for k in reversed(range(PP)):
                gradient[k] += back * (values[k] + 0.2 * values[k] * numbers[k])
                back *= numbers[k] + 0.1 * numbers[k] ** 2
        norms.append(sum(g * g for g in gradient) ** 0.5)
        losses.append(loss)
        if waiting is not None:
            _take(numbers, velocity, *waiting)
        waiting = gradient, norms[-1], RATES[t]
    assert waiting is not None
    _take(numbers, velocity, *waiting)
    return numbers, norms, losses


def _take(numbers: list[float], velocity: list[float], gradient: list[float], norm: float, rate: float) -> None:
    factor = min(1.0, CLIP / (norm + 1e-6))
    for k, g in enumerate(gradient):
        velocity[k] = 0.6 * velocity[k] + factor * g
        numbers[k] -= rate * velocity[k]


def train(
    counts: list[int],
    looks_every: int = 0,
    fault: Callable[[], None] | None = None,
    touch: Callable[[Engine, int], None] | None = None,
    **changes: Any,
) -> tuple[list[float], list[float], list[float]]:
    """Returns what `by_hand` returns, as fold3d reports it: norms and losses one step later."""
    torch.set_default_dtype(torch.float64)
    config = fold3d.ParallelConfig(
        **({"pp": PP, "segments": 1, "micro_batches": PP, "gradient_delay": 1, "flush": False} | changes)
    )
    if fault is not None:
        fault()
    try:
        engine = Engine(Chain(), config, optimizer=sgd, max_grad_norm=CLIP, example={"x": inputs(0, 1)[0]})
        norms, losses = [], []
        for t, m in enumerate(counts):
            assert engine.optimizer is not None
            engine.optimizer.param_groups[0]["lr"] = RATES[t]
            loss = engine.run(
                [{"x": one} for one in inputs(t, m)],
                lambda model, batch, m=m: model(**batch)["loss"] / m,  # type: ignore[misc]
            )
            norm = engine.grad_norm()
            engine._built().step.scale(clip_coefficient(norm, CLIP))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(norm.item())
            if looks_every and t % looks_every == 0:
                engine.evaluate({"x": inputs(0, 1)[0]})
                engine.state_dict()
            if touch is not None:
                touch(engine, t)
        norms.append(engine.finish_updates(CLIP).item())  # type: ignore[union-attr]
        weights = engine.state_dict()["model"]
        engine.close()
        return [weights[f"links.{k}.w"].item() for k in range(PP)], norms, losses
    finally:
        torch.set_default_dtype(torch.float32)


def assert_is(found: tuple[list[float], list[float], list[float]], counts: list[int]) -> None:
    numbers, norms, losses = found
    wanted = by_hand(counts)
    assert numbers == pytest.approx(wanted[0], abs=1e-12)
    assert norms == pytest.approx([0.0, *wanted[1]], abs=1e-12)
    assert min(wanted[1]) > CLIP, "the case must clip"
    assert losses == pytest.approx([0.0, *wanted[2][:-1]], abs=1e-12)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("m", [PP, PP + 3])
def test_a_chain_is_the_recursion(ranks: RankPool, m: int) -> None:
    counts = [m] * STEPS
    results = ranks.run(train, PP, counts)
    for one in results:
        assert_is(one, counts)
    late = ranks.run(train, PP, counts, flush=True)
    assert late[0][:2] == results[0][:2], "the bits of gradient_delay=1"


def test_steps_of_other_sizes_and_looks_in_between_change_no_bit(ranks: RankPool) -> None:
    """A step with fewer micro-batches than stages has a flush, and one with another number begins anew."""
    counts = [PP, PP, PP + 1, PP + 1, 2, PP, PP, PP, PP]
    plain = ranks.run(train, PP, counts)[0]
    numbers, norms, _ = by_hand(counts)
    assert plain[0] == pytest.approx(numbers, abs=1e-12)
    assert plain[1] == pytest.approx([0.0, *norms], abs=1e-12)
    looking = ranks.run(train, PP, counts, 2)[0]
    assert looking[:2] == plain[:2]


def look_before_the_step() -> list[str]:
    """Returns what calls say that end what is in the pipeline before the optimizer has stepped."""
    torch.set_default_dtype(torch.float64)
    config = fold3d.ParallelConfig(pp=PP, segments=1, micro_batches=PP, gradient_delay=1, flush=False)
    engine = Engine(Chain(), config, optimizer=sgd, max_grad_norm=CLIP, example={"x": inputs(0, 1)[0]})
    said = []
    try:
        for t in range(3):
            assert engine.optimizer is not None
            engine.run([{"x": one} for one in inputs(t, PP)], lambda model, batch: model(**batch)["loss"] / PP)
            if t == 2:
                for call in (engine.drain, engine.state_dict):
                    with pytest.raises(Fold3dError) as error:
                        call()
                    said.append(str(error.value))
                return said
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return said
    finally:
        engine.close()
        torch.set_default_dtype(torch.float32)


def test_what_ends_the_pipeline_comes_behind_the_optimizers_step(ranks: RankPool) -> None:
    for drained, state in ranks.run(look_before_the_step, PP):
        assert "each run is followed by optimizer.step(), before evaluations, checkpoints" in drained
        assert "call optimizer.step()" in state or "failed" in state


def groups_of_a_stage() -> str:
    """Returns what a state says whose stages step with other settings."""
    torch.set_default_dtype(torch.float64)

    def by_stage(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1 * (1 + torch.distributed.get_rank()))

    config = fold3d.ParallelConfig(pp=2, segments=1, micro_batches=2, gradient_delay=1)
    engine = Engine(Chain(), config, optimizer=by_stage, example={"x": inputs(0, 1)[0]})
    try:
        engine.run([{"x": one} for one in inputs(0, 2)], lambda model, batch: model(**batch)["loss"] / 2)
        assert engine.optimizer is not None
        engine.optimizer.step()
        with pytest.raises(Fold3dError) as error:
            engine.state_dict()
        return str(error.value)
    finally:
        engine.close()
        torch.set_default_dtype(torch.float32)


def test_stages_with_settings_of_their_own_have_no_state_with_late_gradients(ranks: RankPool) -> None:
    for said in ranks.run(groups_of_a_stage, 2):
        assert "the optimizer has other groups, or other settings of them, on other stages" in said


def _touch(engine: Engine, step: int) -> None:
    """What callbacks do between steps: they write weights, through the parameters and past them, and freeze some."""
    engine.flush()
    for name, parameter in engine.owned.items():
        if step in (0, 3):
            with torch.no_grad():
                parameter.mul_(0.9)
            parameter.data.add_(0.01)
        parameter.requires_grad_(name != "links.1.w" or step not in (4, 5))


def test_what_is_done_to_weights_between_steps_is_of_the_newest_version(ranks: RankPool) -> None:
    """Backwards that are to come know nothing of it."""
    counts = [PP] * STEPS
    without, with_a_flush = (ranks.run(train, PP, counts, touch=_touch, flush=flush)[0] for flush in (False, True))
    assert without[:2] == with_a_flush[:2]


def _points_at_the_newest() -> None:
    WithoutFlush.turn_to = lambda sync, step_before: sync._versions.point(sync._versions.newest)  # type: ignore


def _points_at_nothing() -> None:
    WeightVersions.point = lambda versions, version: None  # type: ignore


def _updates_in_place() -> None:
    """The version before is overwritten as soon as there is a new one, an action too early."""
    fill = WeightVersions.fill

    def wrong(versions: WeightVersions, bucket: Any) -> None:
        fill(versions, bucket)
        versions._flats[bucket.number][1 - versions.newest].fill_(float("nan"))

    WeightVersions.fill = wrong  # type: ignore[method-assign]


FAULTS = [_points_at_the_newest, _points_at_nothing, _updates_in_place]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_version_is_found(ranks: RankPool, fault: Callable[[], None]) -> None:
    counts = [PP] * STEPS
    with pytest.raises(AssertionError):
        assert_is(ranks.run(_alone, PP, counts, fault)[0], counts)


def _alone(counts: list[int], fault: Callable[[], None]) -> Any:
    """Trains with a fault, which is gone afterwards: the process is used again."""
    kept = [(WithoutFlush, "turn_to"), (WeightVersions, "point"), (WeightVersions, "fill")]
    before = [(kind, name, kind.__dict__[name]) for kind, name in kept]
    try:
        return train(counts, fault=fault)
    finally:
        for kind, name, value in before:
            setattr(kind, name, value)


def test_the_memory_of_a_version_is_free_after_its_last_action(ranks: RankPool) -> None:
    """NaN in it, from its last backward to its next update, reaches nothing."""
    counts = [PP] * STEPS
    assert_is(ranks.run(_with_nan, PP, counts)[0], counts)


def _with_nan(counts: list[int]) -> Any:
    done = WithoutFlush.chunk_done

    def after(sync: WithoutFlush, chunk: int) -> None:
        done(sync, chunk)
        versions = sync._versions
        assert versions is not None
        if sync._before != versions.newest:  # all backwards on it are over
            for flats in versions._flats:
                flats[1 - versions.newest].fill_(float("nan"))

    WithoutFlush.chunk_done = after  # type: ignore[method-assign]
    try:
        return train(counts)
    finally:
        WithoutFlush.chunk_done = done  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_delay": 0}, "gradient_delay=0; set gradient_delay=1"),
        ({"schedule": "zb_h1"}, "schedule='zb_h1'; set schedule='1f1b'"),
        ({"segments": 2, "schedule": "auto"}, "segments=2; set segments=1"),
        ({"tp": 2}, "tp=2; set tp=1"),
        ({"pp": 1}, "no effect with pp=1"),
        ({"micro_batches": 3}, "as many micro-batches as stages, here 4"),
        ({"micro_batch_size": 1}, "micro_batch_size=1"),
        ({"memory_limit": "1GB"}, "memory_limit="),
        ({"offload": "activations"}, "offload='activations'; set offload='auto'"),
        ({"offload_optimizer": True}, "offload_optimizer=True"),
        ({"recompute": True}, "recompute='full'"),
        ({"flush": "no"}, "must be True or False"),
    ],
)
def test_what_does_not_go_without_a_flush_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        fold3d.ParallelConfig(
            **({"pp": PP, "segments": 1, "micro_batches": PP, "gradient_delay": 1, "flush": False} | changes)
        )
