"""fold3d.plan.simulator: units, closed forms and errors; the simulation itself is tested in tests/cpp."""

from __future__ import annotations

import dataclasses

import pytest
import torch  # noqa: F401  loads the libraries that _C is linked with

from fold3d import _C, schedule
from fold3d.config import SIMULATED_DP_SYNC
from fold3d.errors import ConfigError
from fold3d.plan.cluster_model import ClusterCosts, Work
from fold3d.plan.simulator import predict, step_ms

MADE = schedule.generate("aiao", pp=2, segments=4, micro_batches=8)


def work(made: schedule.Schedule = MADE, **changes) -> Work:
    """10 ms forward, 20 ms backward and 50 MB of gradients per rank, in 8 layers; free messages."""
    values = {"forward": 0.01, "backward": 0.02, "layers": 8, "activation_bytes": 0, "gradient_bytes": 50_000_000}
    return Work.even(made, **(values | changes))


def cluster(**changes) -> ClusterCosts:
    return ClusterCosts(**({"dp": 2, "bandwidth": 1e9} | changes))


def test_parts_add_up_in_milliseconds():
    made = predict(MADE, work(activation_bytes=100_000), cluster(latency=1e-4), dp_sync="serial")
    assert made.steady
    for rank in made.ranks:
        total = rank.compute_ms + rank.bubble_ms + rank.exposed_pp_ms + rank.exposed_dp_ms
        assert total == pytest.approx(made.step_ms)
        assert rank.compute_ms == pytest.approx(8 * 30)
        assert rank.bubble_ms == pytest.approx(30 / 4)  # (pp-1) micro-batches of one segment
        assert rank.dp_bytes == 50_000_000
        assert rank.pp_bytes == 7 * 8 * 100_000  # chunk 0 gets no activation, chunk 7 no gradient


@pytest.mark.parametrize("pp, m", [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(pp: int, m: int):
    """Qi et al. 2023, table 1, where F = I = W: (p - 1)(F + I - W) instead of (p - 1)(F + I + W)."""
    step = {}
    for name in ("1f1b", "zb_h1"):
        made = schedule.generate(name, pp=pp, micro_batches=m)
        found = predict(made, work(made, gradient_bytes=0), cluster(dp=1))
        assert [rank.compute_ms for rank in found.ranks] == pytest.approx([30 * m] * pp)
        step[name] = found.step_ms
    assert step == {"1f1b": pytest.approx(30 * (m + pp - 1)), "zb_h1": pytest.approx(30 * m + 10 * (pp - 1))}


def test_gradients_of_a_split_backward_come_with_w():
    """One stage and micro-batch: W is the second half of the backward, and gives its first bucket after its half."""
    made = schedule.parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    found = predict(made, work(made, layers=2, gradient_bytes=10_000_000), cluster(), timeline=True)
    ((begin, end),) = [(start, end) for _, action, start, end, _ in found.records[1] if action == "1W0"]
    (first, _) = [start for lane, _, start, _, _ in found.records[1] if lane == "reduce"]
    assert end - begin == 10_000_000 and first == begin + 5_000_000


def test_the_ways_of_dp_sync_are_those_of_the_simulator():
    assert sorted(SIMULATED_DP_SYNC) == sorted(_C.dp_sync_names())


@pytest.mark.parametrize("dp_sync", SIMULATED_DP_SYNC)
def test_one_replica_has_no_dp_sync(dp_sync):
    made = predict(MADE, work(), cluster(dp=1), dp_sync=dp_sync)
    assert made.step_ms == pytest.approx(240 + 7.5) == pytest.approx(made.limit_ms)


def test_hiding_helps_and_early_most():
    """DP.sync of 0.83 x the compute time."""
    much = work(gradient_bytes=200_000_000)
    found = {way: predict(MADE, much, cluster(), dp_sync=way) for way in SIMULATED_DP_SYNC}
    assert found["serial"].step_ms == pytest.approx(247.5 + 200)
    assert found["early"].step_ms < found["zero1"].step_ms < found["blocking"].step_ms < found["serial"].step_ms
    assert min(made.step_ms / made.limit_ms for made in found.values()) >= 1
    early = found["early"]
    assert early.early_gathers is not None and early.early_gathers > 0 and found["zero1"].early_gathers is None
    for number in (0, 3):
        fixed = predict(MADE, much, cluster(), dp_sync="early", early_gathers=number)
        assert fixed.step_ms >= early.step_ms and fixed.early_gathers == number
    assert predict(MADE, much, cluster(), dp_sync="early", early_gathers=0).step_ms == pytest.approx(
        found["zero1"].step_ms
    )


@pytest.mark.parametrize("name", ["aiao", "1f1b", "zb_h1"])
def test_late_gradients_travel_under_a_whole_step(name: str):
    """Free latency: the step is what it is without DP.sync, or what the network takes where that is more."""
    segments = 4 if name == "aiao" else 1
    made = schedule.generate(name, pp=2, segments=segments, micro_batches=8)
    alone = step_ms(made, work(made), cluster(dp=1))
    early = {"dp_sync": "early", "bucket_bytes": 10_000_000}
    for gradient_bytes, wanted in ((200_000_000, alone), (400_000_000, 400.0)):
        found = predict(made, work(made, gradient_bytes=gradient_bytes), cluster(gradient_delay=1), **early)
        exact = predict(made, work(made, gradient_bytes=gradient_bytes), cluster(), **early)
        assert found.steady
        assert wanted <= found.step_ms < 0.95 * exact.step_ms
        assert found.step_ms == pytest.approx(wanted, rel=0.08)  # sums go before gathers of the step before
        assert {rank.dp_bytes for rank in found.ranks} == {gradient_bytes}


def test_late_weights_are_gathered_after_their_update():
    """zero1: the weights travel before the step that reads them, and sums that are under way wait for them."""
    made = schedule.generate("gpipe", pp=1, micro_batches=2)
    late = predict(made, work(made), cluster(gradient_delay=1), dp_sync="zero1", bucket_bytes=100_000_000)
    assert late.step_ms == pytest.approx(60 + 25)


def test_the_norm_of_late_gradients_is_met_at_the_end_of_the_next_step():
    """Two ranks; the norm takes two hops, which nothing hides."""
    made = schedule.generate("gpipe", pp=1, micro_batches=2)
    late = cluster(gradient_delay=1, hop_latency=1e-3)
    assert step_ms(made, work(made), late, dp_sync="early") == pytest.approx(60 + 2)


def test_only_early_and_zero1_gradients_may_be_late():
    for dp_sync in SIMULATED_DP_SYNC:
        if dp_sync not in ("early", "zero1"):
            with pytest.raises(ConfigError, match="gradient_delay is 1; it must be 0"):
                step_ms(MADE, work(), cluster(gradient_delay=1), dp_sync=dp_sync)


def test_more_segments_hide_more():
    steps = []
    for segments in (1, 2, 4, 8):
        made = schedule.generate("aiao", pp=2, segments=segments, micro_batches=8)
        steps.append(predict(made, work(made, gradient_bytes=200_000_000), cluster(), dp_sync="early").step_ms)
    assert steps == sorted(steps, reverse=True)


def test_hosts_and_preemption():
    """Two stages on a host share its card; without preemption messages wait for whole buckets."""
    talk = work(activation_bytes=50_000)
    apart, shared = (predict(MADE, talk, cluster(ranks_per_host=n), dp_sync="serial") for n in (1, 2))
    assert 40 < shared.step_ms - apart.step_ms < 50  # stage 1 ends a little earlier and begins to sum
    assert all(rank.pp_bytes == 0 for rank in shared.ranks)
    small = cluster(slice_bytes=10_000)
    on, off = (predict(MADE, talk, dataclasses.replace(small, preempt=flag), dp_sync="early") for flag in (True, False))
    assert on.preemptions > 0 and on.longest_pp_wait_ms <= 0.01 + 0.05
    assert off.preemptions == 0 and off.longest_pp_wait_ms > 1


def test_what_travels_beside_computing_delays_it():
    plain, slow = cluster(), cluster(toll=0.5e-9)
    for dp_sync in ("early", "zero1"):
        without, delayed = (predict(MADE, work(), one, dp_sync=dp_sync) for one in (plain, slow))
        most = 1e3 * 0.5e-9 * without.ranks[0].dp_bytes / (1 - 0.5e-9 * 1e9)  # each delay is delayed again
        assert without.step_ms < delayed.step_ms <= without.step_ms + most
    # Nothing is computed while these travel, but for the next step's first forward on a stage that waits for nobody.
    one = schedule.generate("1f1b", pp=1, segments=1, micro_batches=4)
    serial = [predict(one, work(one), each, dp_sync="serial").step_ms for each in (plain, slow)]
    assert serial[0] == serial[1]
    with pytest.raises(ConfigError, match="toll_ns"):
        predict(MADE, work(), cluster(toll=1e-9))


def test_links_of_single_borders():
    made = schedule.generate("1f1b", pp=3, segments=1, micro_batches=1)
    sent = work(made, layers=3, activation_bytes=1_000_000)
    alone = cluster(dp=1, bandwidth=1e9)
    even = predict(made, sent, alone).step_ms
    forward, backward = (1e9, 1e8), (5e8, 1e9)
    found = predict(made, sent, dataclasses.replace(alone, links=(forward, backward))).step_ms
    assert found - even == pytest.approx(9 + 1)  # ms that the two slow messages take longer
    with pytest.raises(ConfigError, match="one number for each border of the 3 chunks"):
        predict(made, sent, dataclasses.replace(alone, links=((1e9,), (1e9,))))


def test_step_ms_is_the_short_way():
    much = work(gradient_bytes=200_000_000)
    for way in ("zero1", "blocking", "serial"):
        assert step_ms(MADE, much, cluster(), dp_sync=way) == predict(MADE, much, cluster(), dp_sync=way).step_ms


def test_records_are_a_timeline(tmp_path):
    from fold3d.observe.timeline import events_of, last_ns, write_trace

    made = predict(MADE, work(activation_bytes=10_000), cluster(), dp_sync="early", timeline=True)
    events = events_of(made.records)
    assert {event.lane for event in events} == {"compute", "wait", "send_f", "send_b", "reduce", "gather"}
    kinds = {lane: {event.kind for event in events if event.lane == lane} for lane in ("reduce", "gather")}
    assert kinds == {"reduce": {"REDUCE_GRAD"}, "gather": {"GATHER"}}
    assert last_ns(events) <= made.step_ms * 1e6
    spent = dict.fromkeys(("compute", "wait"), 0)
    for event in events:
        if event.rank == 0 and event.lane in spent:
            spent[event.lane] += event.end - event.start
    assert spent["compute"] / 1e6 == pytest.approx(made.ranks[0].compute_ms)
    assert sum(spent.values()) / 1e6 == pytest.approx(made.step_ms)  # stage 0 ends the step
    first = next(event for event in events if event.lane == "wait")
    assert first.text == "0GATHER" and first.start == 0
    write_trace(tmp_path / "step.json", made.records, pp=2)


def test_uneven_layers_keep_their_sum():
    made = work(layers=10)
    assert sum(made.layers) == 20 and set(made.layers) == {2, 3}
    assert sum(made.forward) == pytest.approx(0.02)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dp": 0}, "dp is 0"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"slice_bytes": 0}, "slice_bytes is 0"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0"),
    ],
)
def test_bad_clusters(change, message):
    with pytest.raises(ConfigError, match=message):
        predict(MADE, work(), cluster(**change))


def test_bad_work():
    with pytest.raises(ConfigError, match="3 layers per rank cannot be cut into 4 segments"):
        work(layers=3)
    with pytest.raises(ConfigError, match="zero1, early"):
        predict(MADE, work(), cluster(), dp_sync="lazy")
    other = schedule.generate("aiao", pp=2, segments=2, micro_batches=8)
    with pytest.raises(ConfigError, match=r"8 numbers long.*each of the 4 chunks"):
        predict(other, work(), cluster())
    with pytest.raises(ConfigError, match="no backward"):
        predict(schedule.forward_only(pp=2, segments=4, micro_batches=8), work(), cluster())


def test_buckets_of_so_many_bytes():
    """Layers of 6.25 MB, two per chunk: one or two buckets per chunk."""
    small = predict(MADE, work(), cluster(), dp_sync="early", bucket_bytes=0)
    assert small.step_ms == predict(MADE, work(), cluster(), dp_sync="early").step_ms
    assert sorted(small.gather_order[0]) == list(range(8))
    large = predict(MADE, work(), cluster(), dp_sync="early", bucket_bytes=7_000_000)
    assert large.step_ms == predict(MADE, work(), cluster(), dp_sync="early", layers_per_bucket=0).step_ms
    assert sorted(large.gather_order[1]) == list(range(4))
    assert predict(MADE, work(), cluster(), dp_sync="zero1").gather_order == ((), ())


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (4, 4), (4, 9)])
def test_without_a_flush_there_is_no_bubble(pp: int, m: int):
    """Free messages: 30 ms a micro-batch, where a flush adds those of the other stages."""
    _, every, _ = schedule.without_flush("1f1b", pp=pp, micro_batches=m)
    found = predict(every, work(every, gradient_bytes=0), cluster(dp=1, gradient_delay=1), dp_sync="early")
    assert found.steady
    assert found.step_ms == pytest.approx(30 * m)
    assert [rank.bubble_ms for rank in found.ranks] == pytest.approx([0.0] * pp, abs=1e-6)


def test_without_a_flush_sums_have_the_time_from_the_last_backward_to_the_next_step_but_one():
    """Stage 0 ends a step (pp - 1) micro-batches into the next step's list: m - pp + 1 are left until the weights are
    read, and what the sums take beyond that makes the step longer."""
    pp, m = 4, 8
    _, every, _ = schedule.without_flush("1f1b", pp=pp, micro_batches=m)
    late = cluster(gradient_delay=1)
    window = 30 * (m - pp + 1)
    hidden = predict(every, work(every, gradient_bytes=(window - 20) * 1_000_000), late, dp_sync="early")
    assert hidden.step_ms == pytest.approx(30 * m, rel=0.02)
    longer = predict(every, work(every, gradient_bytes=(window + 60) * 1_000_000), late, dp_sync="early")
    assert 30 * m + 20 < longer.step_ms < 30 * m + 90
