"""How long layers take whose TP.sync is hidden: Merak's formula, and what no way of hiding can beat; what is chosen by
that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold3d.errors import ConfigError
from fold3d.plan.costs import NetworkCosts, TpExchange
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import layout_of
from fold3d.plan.search import DECISIVE, recheck, search
from fold3d.plan.space import registry
from fold3d.plan.space.tp_overlap import (
    FUSED_SHARE,
    KNOB,
    TpInterval,
    even_regions,
    layers_seconds,
    seconds,
    toll,
    traffic,
)
from fold3d.plan.strategy import Constraints
from tests.plan.jobs import make_job

times = st.floats(0.01, 10.0)


@given(st.integers(1, 8), times, times)
def test_meraks_formula(layers: int, compute: float, sync: float) -> None:
    """Section 5.3: a forward of K layers takes Tm / 4 + (K - 1/4) max(Tm, Ta) + Ta / 4."""
    found = layers_seconds(layers, [TpInterval(compute / 2, sync / 2)] * 2, "sub")
    assert found == pytest.approx(compute / 4 + (layers - 1 / 4) * max(compute, sync) + sync / 4)


@given(st.lists(st.builds(TpInterval, times, times), min_size=1, max_size=12))
def test_bounds(regions: list[TpInterval]) -> None:
    compute, sync = sum(region.compute for region in regions), sum(region.sync for region in regions)
    found = seconds(regions, "sub")
    assert max(compute, sync) <= found * (1 + 1e-9)
    assert found <= seconds(regions, "none") * (1 + 1e-9)
    assert seconds(regions, "none") == pytest.approx(compute + sync)


def test_latencies_do_not_become_shorter_with_half_a_micro_batch() -> None:
    regions = [TpInterval(0.0, 1.0, fixed=0.5)] * 4
    assert seconds(regions, "none") == 4.0
    assert seconds(regions, "sub") == 2 * 4 * 0.75


def test_fused_products_hide_no_more_than_they_take() -> None:
    regions = [TpInterval(compute=8.0, sync=1.0), TpInterval(compute=4.0, sync=3.0)]
    assert seconds(regions, "fused") == pytest.approx(8.0 + 4.0 + 3.0 - FUSED_SHARE * 4.0)


def test_nothing_to_hide() -> None:
    network = NetworkCosts(pp_latency=0.0, pp_bandwidth=1.0, dp_bandwidth=1.0, hop_latency=0.0)
    assert layers_seconds(3, even_regions(2.0, [], 2, network), "sub") == pytest.approx(6.0)


@given(st.integers(2, 8), times)
def test_two_parts_hide_half_of_exchanges_that_follow_each_other_and_three_all(layers: int, compute: float) -> None:
    """A region of a shared sequence is entered right behind the end of the one before it, and each of its two exchanges
    takes half of its computing."""
    regions = [TpInterval(0.0, compute / 2), TpInterval(compute, compute / 2)] * layers
    three = seconds(regions, "sub", parts=3)
    assert three < seconds(regions, "sub", parts=2)
    assert three <= layers * compute + 2 * compute, "all but the ends"


@given(st.lists(st.builds(TpInterval, times, times), min_size=1, max_size=12))
def test_bounds_of_three_parts(regions: list[TpInterval]) -> None:
    compute, sync = sum(region.compute for region in regions), sum(region.sync for region in regions)
    assert max(compute, sync) * (1 - 1e-9) <= seconds(regions, "sub", 3) <= (compute + sync) * (1 + 1e-9)


def test_what_follows_another_exchange_has_nothing_computed_before_it() -> None:
    network = NetworkCosts(pp_latency=0.0, pp_bandwidth=1.0, dp_bandwidth=1.0, hop_latency=0.0, tp_bandwidth=1.0)
    layer = (TpExchange(2, trips=1, follows=True), TpExchange(4, trips=1))
    assert even_regions(6.0, layer, 2, network) == [TpInterval(0.0, 1.0), TpInterval(6.0, 2.0)]
    assert even_regions(6.0, layer[:1], 2, network) == [TpInterval(6.0, 1.0)]


def test_cores_that_links_take_cannot_compute() -> None:
    network = NetworkCosts(
        pp_latency=0.0, pp_bandwidth=1.0, dp_bandwidth=1.0, hop_latency=0.0, tp_bandwidth=1e6, tp_toll=1e-7
    )
    exchanges = (TpExchange(1 << 20),) * 2
    whole = 1e-7 * 2 * (1 << 20)
    assert toll(1.0, exchanges, 2, network, "none") == 0.0
    assert toll(1.0, exchanges, 2, network, "sub") == pytest.approx(whole)
    hidden = 2 * FUSED_SHARE * 0.5 / (2 * 1.048576)
    assert toll(1.0, exchanges, 2, network, "fused") == pytest.approx(hidden * whole)
    assert toll(1.0, (), 2, network, "fused") == 0.0


def test_traffic_of_a_ring() -> None:
    """As csrc/comm/tensor does it: up to 64 KiB in all a tensor goes round whole."""
    assert traffic(TpExchange(1 << 20), 2) == (1 << 20, 2)
    assert traffic(TpExchange(1 << 20), 4) == (1.5 * (1 << 20), 6)
    assert traffic(TpExchange(1 << 20, trips=1), 4) == (0.75 * (1 << 20), 3)
    assert traffic(TpExchange(1 << 16), 2) == (1 << 16, 1) and traffic(TpExchange(1 << 14), 4) == (3 << 14, 3)
    assert traffic(TpExchange(1 << 10, trips=1), 2) == (1 << 9, 1)


def test_another_way() -> None:
    with pytest.raises(ConfigError, match="sub, fused, none"):
        seconds([], "threads")


SIZE = 1 << 20


def shards(*, ratio: float, halves_factor: float | None = 1.0, **changes: object) -> TrainingJob:
    """Returns a job of two shards whose TP.sync takes `ratio` times as long as computing, backwards and forwards."""
    job = make_job(layers=4, micro_batches=4, **changes)
    sums = (TpExchange(SIZE),) * 2
    count = len(job.trace.blocks)
    exchanges = ((), *(sums,) * count, ())
    compute = sum(job.profile.forward) + sum(job.profile.backward)
    return replace(
        job,
        tp=2,
        profile=replace(job.profile, tp_forward=exchanges, tp_backward=exchanges, halves_factor=halves_factor),
        network=replace(job.network, tp_bandwidth=4 * count * SIZE / (ratio * compute)),
    )


FIXED = Constraints(segments=1, schedule="1f1b", dp_sync="early")


def test_the_account_has_what_is_waited_for() -> None:
    job = shards(ratio=1.0)
    found = {way: search(job, replace(FIXED, settings=((KNOB.name, way),))) for way in ("none", "sub")}
    none, sub = (found[way].prediction.ranks[0] for way in ("none", "sub"))
    assert none.compute_ms == pytest.approx(sub.compute_ms)
    layers = sum(job.profile.forward) + sum(job.profile.backward)
    assert none.exposed_tp_ms == pytest.approx(1e3 * layers * job.micro_batches / job.pp, rel=1e-3)
    # A forward computes less than its sums take, a backward more: what is longer hides all but the ends of what is not.
    assert 0 < sub.exposed_tp_ms < 0.3 * none.exposed_tp_ms
    for rank in (none, sub):
        step = rank.compute_ms + rank.exposed_tp_ms + rank.bubble_ms + rank.exposed_pp_ms + rank.exposed_dp_ms
        assert step == pytest.approx(found["none" if rank is none else "sub"].step_ms, rel=1e-4)
    assert "exposed TP.sync" in found["none"].table


@pytest.mark.parametrize(
    ("ratio", "factor", "chosen"),
    [(1.0, 1.0, "sub"), (0.25, 1.0, "auto"), (0.05, 1.0, "auto"), (0.05, 1.3, "auto"), (0.25, 1.25, "fused")],
)
def test_what_is_clearly_faster_is_taken(ratio: float, factor: float, chosen: str) -> None:
    """Else real steps decide. Halves may compute longer than the whole."""
    proposal = search(shards(ratio=ratio, halves_factor=factor, dp=1), FIXED)
    assert KNOB.of(proposal.strategy) == chosen, proposal.table
    (remark,) = [remark for remark in proposal.remarks if remark.startswith("tp_overlap: ")]
    assert remark.endswith("too close to tell, real steps decide" if chosen == "auto" else f": {chosen}")
    assert (f"--tp_overlap {chosen}" in proposal.flags) == (chosen != "auto")
    assert 1.0 < DECISIVE < 1.2


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_links_that_take_cores_make_hiding_dear(share: float) -> None:
    job = shards(ratio=0.25, dp=1)
    job = replace(job, network=replace(job.network, tp_toll=share / job.network.tp_bandwidth))
    assert KNOB.of(search(job, FIXED).strategy) == "auto"
    found = [search(job, replace(FIXED, settings=((KNOB.name, way),))) for way in ("none", "sub")]
    none, sub = (one.prediction.ranks[0] for one in found)
    # What is taken is computing that takes longer, nothing that is waited for.
    assert sub.compute_ms == pytest.approx((1 + 0.25 * share) * none.compute_ms, rel=0.01)
    idle = replace(job, profile=replace(job.profile, busy=0.0))  # nothing is taken from layers without a core
    free = search(idle, replace(FIXED, settings=((KNOB.name, "sub"),))).prediction.ranks[0]
    assert free.compute_ms == pytest.approx(none.compute_ms, rel=0.01)


def test_what_cannot_be_divided_is_not() -> None:
    proposal = search(shards(ratio=1.0, halves_factor=None, dp=1), FIXED)
    assert KNOB.of(proposal.strategy) == "fused", "what can hide TP.sync there"
    assert "tp_overlap: fused takes" in proposal.table and ", sub" not in proposal.table
    asked = search(shards(ratio=1.0, halves_factor=None, dp=1), replace(FIXED, settings=((KNOB.name, "sub"),)))
    none = search(shards(ratio=1.0, halves_factor=None, dp=1), replace(FIXED, settings=((KNOB.name, "none"),)))
    assert asked.step_ms == none.step_ms > proposal.step_ms


def test_without_shards_nothing_mentions_it() -> None:
    proposal = search(make_job(layers=4, micro_batches=4), FIXED)
    assert "tp_overlap" not in str(proposal.strategy) and "tp_overlap" not in proposal.table
    assert KNOB in registry.in_settings(2) and KNOB not in registry.in_settings(1)


def test_measured_waits_are_part_of_measured_times() -> None:
    job = shards(ratio=1.0, dp=1)
    slow = search(job, replace(FIXED, schedule="gpipe", settings=((KNOB.name, "none"),)))
    layout = layout_of(registry.with_costs(job, slow.strategy.settings), slow.strategy.ranges, 1)
    forward, backward = ([1e3 * time for time in times] for times in (layout.forward, layout.backward))
    uneven = ([*forward[:-1], 3 * forward[-1]], [*backward[:-1], 3 * backward[-1]])
    for tp_ms, share in ((None, 0.5), (tuple([0.1 * ms for ms in times] for times in uneven), 0.1)):
        better = recheck(replace(job, micro_batches=4), slow.strategy, *uneven, tp_ms)
        if better is None:  # nothing is faster: the account of what is there is not asked for
            continue
        last = better.prediction.ranks[-1]
        assert last.exposed_tp_ms == pytest.approx(share * 4 * sum(times[-1] for times in uneven), rel=0.01)
