"""What the planner says of an optimizer in host memory, and of the memory that an update needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fold3d.errors import ConfigError
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import peaks_of
from fold3d.plan.memory_options import cheapest_changes, predicted_curves
from fold3d.plan.search import decide, search
from fold3d.plan.space.offload import OPTIMIZER, optimizer_costs
from fold3d.plan.strategy import Constraints, parse
from fold3d.profile.optimizer import update_cost
from tests.plan.jobs import make_job

ON_HOST = (("offload_optimizer", "True"),)
BYTES = 8_000_000


def job(**changes: object) -> TrainingJob:
    return make_job(layers=8, micro_batches=4, gradient_bytes=BYTES, copy_bandwidth=1e9, **changes)


@pytest.mark.parametrize(("dp_sync", "share"), [("early", 1), ("zero1", 2)])
def test_the_state_counts_in_host_memory(dp_sync: str, share: int) -> None:
    plain = Constraints(segments=1, schedule="1f1b", dp_sync=dp_sync)
    without, on = (search(job(), constraints) for constraints in (plain, replace(plain, settings=ON_HOST)))
    state = 2 * BYTES // share
    assert without.memory_bytes - on.memory_bytes == state
    assert all(peak.host == state for peak in on.peaks) and all(peak.host == 0 for peak in without.peaks)
    assert on.step_ms > without.step_ms
    assert any(
        "offload_optimizer=True costs" in remark and "in host memory" in remark for remark in on.remarks
    ) and not any("offload_optimizer" in remark for remark in without.remarks)
    assert "--offload_optimizer True" in on.flags and "offload_optimizer" not in without.flags
    assert parse(str(on.strategy)) == on.strategy and OPTIMIZER.of(on.strategy) and not OPTIMIZER.of(without.strategy)
    assert peaks_of(predicted_curves(job(), on.strategy)) == on.peaks


def test_it_costs_the_host_s_time_and_three_copies_once() -> None:
    made = optimizer_costs(job(), True)
    assert made.profile.update_seconds == pytest.approx(1e-8 + 3 / 1e9)
    assert optimizer_costs(made, True) is made and optimizer_costs(job(), False).profile.update_seconds == 1e-9
    with pytest.raises(ConfigError, match=r"offload_optimizer='perhaps': must be True or False"):
        search(job(), Constraints(settings=(("offload_optimizer", "perhaps"),)))


def test_each_replica_steps_its_share_on_the_host() -> None:
    slow = job(dp=4, bandwidth=1e9)
    slow = replace(slow, profile=replace(slow.profile, host_update_seconds=1e-7))
    assert decide(slow, Constraints(), lambda: True).strategy.dp_sync == "early"
    assert decide(slow, Constraints(settings=ON_HOST), lambda: True).strategy.dp_sync == "zero1"
    assert decide(slow, Constraints(settings=ON_HOST), lambda: False).strategy.dp_sync == "early"


def test_it_is_named_where_memory_is_short() -> None:
    strategy = search(job(), Constraints(segments=1, schedule="1f1b")).strategy
    here, elsewhere = (
        [change.setting for change in cheapest_changes(job(host_is_elsewhere=where), strategy, count=9)]
        for where in (False, True)
    )
    assert "offload_optimizer=True" in elsewhere and "offload_optimizer=True" not in here


@pytest.mark.parametrize("together", [False, True])
def test_an_update_needs_memory_of_what_it_steps_at_once(together: bool) -> None:
    """One replica steps all its parameters in a call, several bucket by bucket; a loop needs it of one parameter."""
    plain = Constraints(segments=1, schedule="1f1b", dp_sync="early")
    for dp, at_once in ((1, BYTES), (2, None)):
        before = job(dp=dp)
        needs = replace(before, profile=replace(before.profile, update_bytes=10.0, updates_together=together))
        added = search(needs, plain)
        workspace = added.peaks[0].uses[-1]
        if together and at_once is not None:
            assert workspace == 10 * at_once
        elif not together:
            assert workspace == 10 * BYTES // 8  # a layer has one parameter
        else:
            assert 10 * BYTES // 8 <= workspace <= 10 * BYTES
        on_host = search(needs, replace(plain, settings=ON_HOST))
        assert on_host.peaks[0].uses[-1] < workspace


def test_what_an_update_needs_is_measured() -> None:
    cpu = torch.device("cpu")
    loop = update_cost(lambda p: torch.optim.AdamW(p, foreach=False), cpu)
    assert loop.state == pytest.approx(2, abs=0.01) and not loop.together and 0.9 < loop.workspace < 3.1
    at_once = update_cost(lambda p: torch.optim.AdamW(p, foreach=True), cpu)
    assert at_once.together and loop.host_seconds == loop.seconds
    fused = update_cost(lambda p: torch.optim.AdamW(p, fused=True), cpu)
    assert fused.workspace < 0.1 and not fused.together
