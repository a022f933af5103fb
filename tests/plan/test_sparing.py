"""What the search does where memory is short: recomputation, copies to the pool, as little of both as it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fold3d.plan.costs import LayerBytes
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import Spared
from fold3d.plan.memory_options import predicted_curves
from fold3d.plan.search import decide, recheck, search
from fold3d.plan.strategy import Constraints, parse
from tests.plan.jobs import make_job

SAVED, SENT = 1_000_000, 8192


def large(**changes: Any) -> TrainingJob:
    """A job whose layers keep much more than they hand on."""
    job = make_job(**({"layers": 8, "micro_batches": 8, "gradient_bytes": 800_000, "dp": 1} | changes))
    count = len(job.profile.layers) - 2
    layer = LayerBytes(saved=SAVED, outputs=SENT, forward=SAVED, backward=SAVED)
    nothing = LayerBytes(saved=0, outputs=0, forward=0, backward=0)
    return replace(job, profile=replace(job.profile, layers=(nothing, *(layer,) * count, nothing)))


def spared(found: Any) -> Spared:
    assert parse(str(found.strategy)) == found.strategy
    return Spared.of(found.strategy.settings)


def test_without_a_limit_and_within_it_nothing_is_spared() -> None:
    free = search(large())
    assert spared(free).nothing
    roomy = search(large(memory_limit=free.memory_bytes, pool_is_elsewhere=True))
    assert replace(roomy.strategy, settings=()) == replace(free.strategy, settings=()) and spared(roomy).nothing


@pytest.mark.parametrize("share", [0.8, 0.5, 0.25])
def test_as_little_is_recomputed_as_it_takes(share: float) -> None:
    fixed = Constraints(segments=4, schedule="aiao")
    free = search(large(), fixed)
    limit = int(share * free.memory_bytes)
    job = large(memory_limit=limit)
    found = search(job, fixed)
    assert found.memory_bytes <= limit
    assert not spared(found).recompute.nothing and spared(found).offload.nothing
    curves = predicted_curves(job, found.strategy)
    assert max(curve.peak.device for curve in curves) == found.memory_bytes
    everything = search(large(), replace(fixed, settings=(("recompute", "full"),)))
    assert free.step_ms < found.step_ms < everything.step_ms * 1.001
    assert any(f"{spared(found)} costs " in remark and "without it stage" in remark for remark in found.remarks)


def test_less_is_recomputed_where_more_fits() -> None:
    fixed = Constraints(segments=4, schedule="aiao")
    whole = search(large(), fixed).memory_bytes
    times = [search(large(memory_limit=int(share * whole)), fixed).step_ms for share in (0.9, 0.7, 0.5, 0.3)]
    assert times == sorted(times) and times[0] < times[-1]


def test_earlier_stages_recompute_more() -> None:
    """1F1B keeps pp - stage micro-batches (Merak, section 5.2)."""
    fixed = Constraints(segments=1, schedule="1f1b")
    free = search(large(pp=4), fixed)
    sizes = [peak.bytes for peak in free.peaks]
    assert sizes == sorted(sizes, reverse=True)
    found = search(large(pp=4, memory_limit=sizes[2] + SENT), fixed)
    choices = spared(found).recompute.of_chunks(4)
    assert not choices[0].nothing and choices[3].nothing and choices[2].nothing
    assert found.memory_bytes <= sizes[2] + SENT


def test_what_can_leave_leaves_where_copies_are_fast_and_is_mixed_where_they_are_not() -> None:
    fixed = Constraints(segments=4, schedule="aiao")
    limit = search(large(), fixed).memory_bytes // 4
    fast = search(large(memory_limit=limit, pool_is_elsewhere=True, copy_bandwidth=1e12), fixed)
    assert spared(fast).recompute.nothing and spared(fast).offload.what == "activations"
    assert max(peak.pool for peak in fast.peaks) > limit
    alone = search(large(memory_limit=limit), fixed)
    assert fast.step_ms < alone.step_ms
    job = large(memory_limit=limit, pool_is_elsewhere=True)
    step_bytes = 2 * 8 * 8 * SAVED  # of a rank: out and back
    slow = search(replace(job, copy_bandwidth=0.7 * step_bytes / (fast.step_ms / 1e3)), fixed)
    assert fast.step_ms < slow.step_ms <= alone.step_ms
    assert slow.memory_bytes <= limit and "offload" in str(spared(slow)) and "recompute" in str(spared(slow))


def test_no_more_leaves_than_must() -> None:
    """Copies that take longer than the forwards beside them hide where some micro-batches' stashes stay."""
    fixed = Constraints(segments=4, schedule="aiao")
    free = search(large(), fixed)
    all_of_it = replace(fixed, settings=(("recompute", "none"), ("offload", "activations")))
    job = large(pool_is_elsewhere=True, copy_bandwidth=SAVED / (1.25 * large().profile.forward[1]))
    slow = search(job, all_of_it)
    assert slow.step_ms > 1.02 * free.step_ms
    percents = []
    for share in (0.9, 0.7, 0.5):
        found = search(replace(job, memory_limit=int(share * free.memory_bytes)), fixed)
        assert spared(found).recompute.nothing and found.memory_bytes <= share * free.memory_bytes
        assert found.step_ms < 1.003 * free.step_ms
        percents.append(spared(found).offload.percent)
    assert percents == sorted(percents) and percents[0] < percents[-1] < 100
    pinned = replace(fixed, settings=(("recompute", "none"), ("offload", f"activations:{percents[-1]}%")))
    assert search(job, pinned).step_ms == pytest.approx(found.step_ms, rel=0.003)


def test_a_pool_has_its_size() -> None:
    fixed = Constraints(segments=4, schedule="aiao")
    limit = search(large(), fixed).memory_bytes // 4
    job = large(memory_limit=limit, pool_is_elsewhere=True, copy_bandwidth=1e12)
    size = max(peak.pool for peak in search(job, fixed).peaks) // 2
    found = search(replace(job, pool_limit=size), fixed)
    assert found.memory_bytes <= limit and max(peak.pool for peak in found.peaks) <= size
    leaves = replace(fixed, settings=(("recompute", "none"), ("offload", "activations")))
    table = search(replace(job, pool_limit=size), leaves).table
    assert "nothing that was tried fits into a pool of" in table and "setting offload_pool" in table


def test_what_the_user_has_fixed_stays() -> None:
    fixed = Constraints(segments=4, schedule="aiao", settings=(("recompute", "none"), ("offload", "none")))
    free = search(large(), fixed)
    found = search(large(memory_limit=free.memory_bytes // 2, pool_is_elsewhere=True), fixed)
    assert spared(found).nothing and "nothing that was tried fits" in found.table
    again = replace(fixed, settings=(("recompute", "full"),))
    found = search(large(memory_limit=free.memory_bytes // 2, pool_is_elsewhere=True), again)
    assert str(spared(found).recompute) == "full"
    chunks = "/".join(["full", "none"] * 4)
    found = search(large(), Constraints(schedule="aiao", settings=(("recompute", chunks),)))
    assert found.strategy.segments == 4 and str(spared(found).recompute) == chunks


def test_zero1_comes_before_recomputation() -> None:
    """It saves memory for less time, where the optimizer's state is what is large."""
    settings = {"dp": 2, "gradient_bytes": 12_500_000}
    fixed = Constraints(segments=4, schedule="aiao")
    early = search(large(**settings), replace(fixed, dp_sync="early"))
    job = large(**settings, memory_limit=early.memory_bytes - 1_000_000)
    found = decide(job, fixed, lambda: True)
    whole = decide(job, fixed, lambda: False)
    assert found.memory_bytes <= job.memory_limit >= whole.memory_bytes
    assert whole.strategy.dp_sync == "early" and not spared(whole).nothing
    assert found.step_ms <= whole.step_ms


def test_measured_backwards_have_what_blocks_compute_again_in_them() -> None:
    fixed = Constraints(segments=2, schedule="aiao", settings=(("recompute", "blocks"),))
    job = large()
    choice = search(job, fixed)
    forward = [1e3 * sum(job.profile.forward[1:]) / 4] * 4
    backward = [1e3 * (sum(job.profile.backward[1:]) + sum(job.profile.forward[1:])) / 4] * 4
    assert recheck(job, choice.strategy, forward, backward) is None


def test_the_least_is_told_where_nothing_fits() -> None:
    found = search(large(memory_limit=1), Constraints(segments=2, schedule="aiao"))
    plain = search(large(), Constraints(segments=2, schedule="aiao"))
    assert found.memory_bytes < plain.memory_bytes and "the least" in found.table
    assert found.peaks[found.fullest_stage].bytes == found.memory_bytes


def test_faster_plans_that_do_not_fit_are_called_so() -> None:
    fixed = Constraints(segments=4, schedule="aiao")
    free = search(large(), fixed)
    rows = dict(search(large(memory_limit=free.memory_bytes // 2), fixed).runners_up)
    assert any(name.endswith(", does not fit") for name in rows)
    assert not any(name.endswith("does not fit") for name, _ in free.runners_up)
