"""Late gradients in plans: known where they are set, never chosen, and a second buffer of gradients in memory."""

from __future__ import annotations

import pytest

from fold3d.cli.main import main
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.memory.model import USES
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
