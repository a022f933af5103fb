"""Late gradients in plans: known where they are set, never chosen, and a second buffer of gradients in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fold3d.cli.main import main
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.layout import layout_of
from fold3d.plan.memory import USES
from fold3d.plan.resolve import constraints_of
from fold3d.plan.search import search
from fold3d.plan.space import registry
from fold3d.plan.space.dp_sync import DELAY
from fold3d.plan.strategy import parse
from tests.plan.jobs import make_job


def test_the_planner_knows_it_and_never_chooses_it() -> None:
    job = make_job(bandwidth=4e6)  # the network is what a step waits for
    exact = search(job, registry.constrained())
    late = search(job, registry.constrained(gradient_delay=1))
    assert DELAY.of(exact.strategy) == 0 and DELAY.of(late.strategy) == 1
    assert late.step_ms < 0.97 * exact.step_ms
    assert "--gradient_delay 1" in registry.flags_of(late.strategy)
    assert "gradient_delay" not in registry.flags_of(exact.strategy)
    assert parse(str(late.strategy)) == late.strategy


@pytest.mark.parametrize("dp", [1, 2])
def test_memory_has_two_sets_of_gradients(dp: int) -> None:
    named = {"segments": 1, "schedule": "1f1b", "dp_sync": "early"}
    peaks = [search(make_job(dp=dp), registry.constrained(**named, gradient_delay=delay)).peaks for delay in (0, 1)]
    place = USES.index("gradients")
    for exact, late in zip(*peaks, strict=True):
        assert late.uses[place] == 2 * exact.uses[place] > 0


def test_a_users_setting_is_the_knobs() -> None:
    constraints = constraints_of(ParallelConfig(dp=2, gradient_delay=1))
    assert DELAY.fixed(constraints) == 1
    with pytest.raises(ConfigError, match="gradient_delay=2: must be 0 or 1"):
        registry.constrained(gradient_delay=2)
    with pytest.raises(ConfigError, match="nothing to hide"):
        registry.constrained(gradient_delay=1, dp_sync="serial")


def test_the_command_line_simulates_it(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for delay in ("0", "1"):
        words = ["simulate", "1f1b", "-p", "2", "-m", "8", "--gradients", "300", "--dp-sync", "early"]
        assert main([*words, "--gradient-delay", delay]) == 0
        steps.append(float(capsys.readouterr().out.split("step ")[1].split(" ms")[0]))
    assert steps[1] < 0.9 * steps[0]


def test_a_second_version_of_weights_and_the_state_of_a_correction_are_counted() -> None:
    named = {"segments": 1, "schedule": "1f1b", "dp_sync": "early", "gradient_delay": 1}
    job = make_job(pp=2, micro_batches=4, bandwidth=4e7)
    late, flowing, predicted, fed_back = (
        search(replace(job, **changes), registry.constrained(**named)).peaks
        for changes in ({}, {"flush": False}, {"delay_correction": "predict"}, {"delay_correction": "error_feedback"})
    )
    weights, optimizer = USES.index("weights"), USES.index("optimizer")
    for plain, two, also_two, fed in zip(late, flowing, predicted, fed_back, strict=True):
        assert two.uses[weights] == also_two.uses[weights] == 2 * plain.uses[weights] > 0
        assert fed.uses[weights] == plain.uses[weights]
        assert fed.uses[optimizer] > plain.uses[optimizer] == two.uses[optimizer]


def test_steps_without_a_flush_are_predicted() -> None:
    """Where the bubble is large and little is sent a step takes what its stage computes."""
    job = make_job(dp=1, pp=4, micro_batches=4)
    named = {"segments": 1, "schedule": "1f1b", "dp_sync": "early", "gradient_delay": 1}
    late = search(job, registry.constrained(**named))
    flowing = search(replace(job, flush=False), registry.constrained(**named))
    assert flowing.step_ms < 0.75 * late.step_ms
    layout = layout_of(job, flowing.strategy.ranges, flowing.strategy.bucket_bytes)
    slowest = max(f + b for f, b in zip(layout.forward, layout.backward, strict=True))
    assert flowing.step_ms == pytest.approx(4 * 1e3 * slowest, rel=0.1)
    with pytest.raises(ConfigError, match="set schedule to 1f1b"):
        search(replace(job, flush=False), registry.constrained(**named | {"schedule": "zb_h1"}))
    with pytest.raises(ConfigError, match="at least as many micro-batches as stages"):
        search(replace(job, flush=False, micro_batches=3), registry.constrained(**named))
