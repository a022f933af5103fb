"""Where a step's time went."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fold3d
from fold3d.errors import ConfigError
from fold3d.observe.step_breakdown import RawRecord, make_breakdown, merged, overlap_ns, without
from fold3d.plan.simulator import RankBreakdown

MS = 1_000_000


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [(0, 10)], 0),
        ([(0, 10)], [(0, 10)], 10),
        ([(0, 4), (6, 9)], [(2, 7)], 3),
        ([(5, 6)], [(0, 5), (6, 9)], 0),
        ([(0, 100)], [(10, 20), (30, 40)], 20),
    ],
)
def test_overlap(first: list[tuple[int, int]], second: list[tuple[int, int]], expected: int) -> None:
    assert overlap_ns(first, second) == overlap_ns(second, first) == expected


def test_account_tells_hidden_from_exposed() -> None:
    records = [
        ("gather", "0GATHER", -5 * MS, 8 * MS, 1024),  # of the step before
        ("wait", "0GATHER", 2 * MS, 5 * MS, 0),  # inside the layer's forward
        ("recv_b", "0RECV_B0", 12 * MS, 14 * MS, 256),
        ("compute", "0F0", 0, 10 * MS, 0),
        ("wait", "0RECV_B0", 10 * MS, 14 * MS, 0),
        ("compute", "0B0", 14 * MS, 30 * MS, 0),
        ("reduce", "2REDUCE_GRAD", 12 * MS, 20 * MS, 4096),
        ("reduce", "0REDUCE_GRAD", 30 * MS, 37 * MS, 4096),
        ("send_f", "0SEND_F0", 10 * MS, 11 * MS, 512),
        ("wait", "0REDUCE_GRAD", 30 * MS, 37 * MS, 0),
    ]
    breakdown = make_breakdown(records, 0, 37 * MS)
    assert breakdown.step_ms == 37
    assert breakdown.compute_ms == 23
    assert breakdown.bubble_ms == 2
    assert breakdown.exposed_pp_ms == 2
    assert breakdown.exposed_dp_ms == 3 + 7
    assert breakdown.hidden_dp_ms == 2 + 3 + 6
    assert (breakdown.pp_bytes, breakdown.dp_bytes) == (512, 8192 + 1024)
    assert (
        breakdown.compute_ms + breakdown.bubble_ms + breakdown.exposed_pp_ms + breakdown.exposed_dp_ms
        == breakdown.step_ms
    )
    assert "predicted_step_ms" not in breakdown.log(dp=2, pp=2)
    stage = RankBreakdown(
        compute_ms=22.0, bubble_ms=3.0, exposed_pp_ms=1.0, exposed_dp_ms=10.0, hidden_dp_ms=12.0, pp_bytes=0, dp_bytes=0
    )
    predicted = make_breakdown(records, 0, 37 * MS, 36.0, None, stage).log(dp=2, pp=2)
    assert {name: value for name, value in predicted.items() if name.startswith("predicted")} == {
        "predicted_step_ms": 36.0,
        "predicted_bubble_ms": 3.0,
        "predicted_pp_exposed_ms": 1.0,
        "predicted_dp_exposed_ms": 10.0,
        "predicted_dp_hidden_ms": 12.0,
    }


def test_the_parts_of_the_log_add_up_to_the_step() -> None:
    """Whatever rounding does; what is in no part is said, too."""
    records = [
        ("compute", "0F0", 0, 10 * MS + 33_333, 0),
        ("wait", "0RECV_B0", 11 * MS, 14 * MS + 44_444, 0),
        ("compute", "0B0", 15 * MS, 30 * MS + 77_777, 0),
        ("wait", "0REDUCE_GRAD", 31 * MS, 36 * MS + 66_666, 0),
    ]
    breakdown = make_breakdown(records, 0, 40 * MS)
    for one in (breakdown, breakdown.lasting(55.55), breakdown.lasting(3.0)):
        log = one.log(dp=2, pp=2)
        parts = ("compute_ms", "bubble_ms", "pp_exposed_ms", "dp_exposed_ms", "other_ms")
        assert sum(log[name] for name in parts) == pytest.approx(log["step_ms"], abs=1e-6)
    assert breakdown.log(dp=2, pp=2)["other_ms"] == pytest.approx(40 - 10.03 - 15.08 - 3.04 - 5.07, abs=0.2)
    assert breakdown.lasting(55.55).log(dp=2, pp=2)["step_ms"] == pytest.approx(55.55, abs=0.051)
    assert breakdown.lasting(3.0).step_ms == 40
    predicted = make_breakdown(records, 0, 40 * MS, 41.0).lasting(50.0)
    assert (predicted.step_ms, predicted.predicted_ms) == (50, 51), "loading is nobody's prediction"


@pytest.mark.parametrize(
    ("dp", "pp", "absent", "present"),
    [
        (1, 1, {"bubble_ms", "pp_exposed_ms", "dp_exposed_ms", "preemptions", "predicted_bubble_ms"}, set()),
        (1, 2, {"dp_exposed_ms", "dp_hidden_ms", "preemptions", "predicted_dp_hidden_ms"}, {"predicted_bubble_ms"}),
        (2, 1, {"bubble_ms", "pp_hidden_ms", "preemptions", "dp_held_ms"}, {"dp_hidden_ms", "predicted_dp_hidden_ms"}),
    ],
)
def test_what_cannot_be_in_a_layout_is_not_logged(dp: int, pp: int, absent: set[str], present: set[str]) -> None:
    stage = RankBreakdown(
        compute_ms=1.0, bubble_ms=1.0, exposed_pp_ms=1.0, exposed_dp_ms=1.0, hidden_dp_ms=1.0, pp_bytes=0, dp_bytes=0
    )
    log = make_breakdown([], 0, MS, 1.0, None, stage).log(dp=dp, pp=pp)
    assert not absent & set(log)
    assert present | {"step_ms", "compute_ms", "other_ms", "predicted_step_ms"} <= set(log)


def test_small_exchanges_count_as_what_they_wait_for() -> None:
    """While sums are under way the late ones are replicas; else they are stages."""
    records = [
        ("compute", "0B0", 0, 10 * MS, 0),
        ("reduce", "0REDUCE_GRAD", 5 * MS, 16 * MS, 4096),
        ("wait", "MEET", 11 * MS, 19 * MS, 0),
    ]
    breakdown = make_breakdown(records, 0, 20 * MS)
    assert (breakdown.exposed_dp_ms, breakdown.bubble_ms, breakdown.compute_ms) == (5, 3, 10)
    again = make_breakdown(breakdown.records, 0, 20 * MS)
    assert (again.exposed_dp_ms, again.bubble_ms) == (5, 3), "the timeline says the same"
    log = breakdown.log(dp=2, pp=1)
    assert (log["dp_exposed_ms"], log["other_ms"]) == (5, 5) and "bubble_ms" not in log


def test_a_host_that_waits_while_its_device_works_costs_nothing() -> None:
    """It waits for the loss from 5 to 25; the device computes to 12, waits for a message to 15, and ends at 20."""
    records: list[RawRecord] = [
        ("compute", "1F0", 0, 12 * MS, 0),
        ("wait", "MEET", 5 * MS, 25 * MS, 0),
        ("wait", "1RECV_F1", 12 * MS, 15 * MS, 0),
        ("recv_f", "1RECV_F1", 12 * MS, 15 * MS, 8),
    ]
    breakdown = make_breakdown(records, 0, 20 * MS)
    assert (breakdown.compute_ms, breakdown.exposed_pp_ms, breakdown.bubble_ms) == (12.0, 3.0, 5.0)


def test_account_tells_what_messages_and_dp_sync_cost_each_other() -> None:
    arbiter = {"preemptions": 3, "yields": 9, "held_ns": 8 * MS, "preempted_ns": 5 * MS, "delayed_ns": 2 * MS}
    log = make_breakdown([], 0, MS, None, arbiter).log(dp=2, pp=2)
    assert (log["preemptions"], log["dp_held_ms"], log["pp_delayed_ms"]) == (3, 5, 2)
    assert make_breakdown([], 0, MS).preemptions == 0


TP_RECORDS = [
    ("compute", "0F0", 0, 10 * MS, 0),
    ("tp_sync", "all-reduce", 2 * MS, 5 * MS, 100),
    ("wait", "TP_SYNC", 3 * MS, 5 * MS, 0),
    ("wait", "0GATHER", 6 * MS, 7 * MS, 0),
    ("compute", "0B0", 10 * MS, 30 * MS, 0),
    ("tp_sync", "all-reduce", 12 * MS, 19 * MS, 100),
    ("tp_sync", "all-reduce", 17 * MS, 21 * MS, 100),
    ("wait", "TP_SYNC", 14 * MS, 18 * MS, 0),
]


def test_exposed_tp_sync_is_no_computing() -> None:
    """A rank knows it from records where there are any, else from what was counted; both say the same."""
    recorded = make_breakdown(TP_RECORDS, 0, 30 * MS)
    assert (recorded.exposed_tp_ms, recorded.hidden_tp_ms, recorded.tp_bytes) == (2 + 4, 1 + 2 + 3, 300)
    assert (recorded.compute_ms, recorded.exposed_dp_ms) == (30 - 6 - 1, 1)
    counted = {"waited_ns": 6 * MS, "hidden_ns": 6 * MS, "bytes": 300, "exchanges": 3, "transfer_ns": 14 * MS}
    rest = [record for record in TP_RECORDS if record[0] != "tp_sync" and record[1] != "TP_SYNC"]
    for records in (TP_RECORDS, rest):
        breakdown = make_breakdown(records, 0, 30 * MS, shards=counted)
        assert breakdown.compute_ms == recorded.compute_ms
        assert (breakdown.exposed_tp_ms, breakdown.hidden_tp_ms, breakdown.tp_bytes) == (6, 6, 300)
    log = recorded.log(dp=2, pp=1, tp=2)
    assert (log["tp_exposed_ms"], log["tp_hidden_ms"], log["other_ms"]) == (6, 6, 0)
    assert sum(log[f"{part}_ms"] for part in ("compute", "tp_exposed", "dp_exposed", "other")) == log["step_ms"]


def test_predicted_tp_sync_stands_beside_what_is_counted() -> None:
    predicted = RankBreakdown(
        compute_ms=10.0, bubble_ms=0.0, exposed_pp_ms=0.0, exposed_dp_ms=0.0, hidden_dp_ms=0.0, pp_bytes=0, dp_bytes=0,
        exposed_tp_ms=4.0,
    )  # fmt: skip
    counted = make_breakdown(TP_RECORDS, 0, 30 * MS, 31.0, None, predicted)
    assert counted.log(dp=1, pp=1, tp=2)["predicted_tp_exposed_ms"] == 4.0
    assert "predicted_tp_exposed_ms" not in counted.log(dp=1, pp=1)
    rest = [record for record in TP_RECORDS if record[0] != "tp_sync" and record[1] != "TP_SYNC"]
    unknown = make_breakdown(rest, 0, 30 * MS, 31.0, None, replace(predicted, exposed_tp_ms=0.0))
    assert "predicted_tp_exposed_ms" not in unknown.log(dp=1, pp=1, tp=2), "computing has it, as measured"


def test_tp_sync_that_nobody_counts_is_not_logged() -> None:
    breakdown = make_breakdown([("compute", "0F0", 0, 10 * MS, 0)], 0, 10 * MS)
    assert breakdown.exposed_tp_ms is breakdown.hidden_tp_ms is None
    assert not {"tp_exposed_ms", "tp_hidden_ms"} & set(breakdown.log(dp=2, pp=2, tp=2))
    counted = make_breakdown([], 0, MS, shards={"waited_ns": 0, "hidden_ns": 0, "bytes": 0})
    assert "tp_exposed_ms" in counted.log(dp=1, pp=1, tp=2)
    assert "tp_exposed_ms" not in counted.log(dp=1, pp=1)


def test_what_ended_before_the_step_does_not_count() -> None:
    records = [("wait", "0GATHER", -9 * MS, -3 * MS, 0), ("compute", "0F0", 0, 4 * MS, 0)]
    breakdown = make_breakdown(records, 0, 4 * MS)
    assert (breakdown.exposed_dp_ms, breakdown.compute_ms) == (0, 4)


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=8)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in spans for point in range(start, end)}


@given(SPANS, SPANS)
def test_spans_are_sets_of_moments(spans: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    union = merged(spans)
    assert points(union) == points(spans)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(union))
    assert points(without(union, holes)) == points(spans) - points(holes)


@pytest.mark.parametrize(
    ("spans", "holes", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 4), (3, 6)], [(0, 2), (6, 10)]),
        ([(0, 4), (6, 9)], [(3, 7)], [(0, 3), (7, 9)]),
        ([(0, 4)], [(0, 9)], []),
        ([(5, 6)], [(0, 5), (6, 9)], [(5, 6)]),
    ],
)
def test_without(spans: list[tuple[int, int]], holes: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert without(spans, holes) == expected


def small_engine() -> tuple[fold3d.Engine, dict[str, torch.Tensor]]:
    """Returns an engine in this process alone, and a micro-batch."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    batch = {"input": torch.ones(2, 2)}
    return fold3d.Engine(model, fold3d.ParallelConfig(), example=batch), batch


class Gate:
    """Counts what the test says."""

    def __init__(self) -> None:
        self.counted = {"preemptions": 7, "preempted_ns": 5 * MS, "delayed_ns": 3 * MS}

    def counters(self) -> dict[str, int]:
        return dict(self.counted)


def test_a_step_s_account_has_what_the_gate_counted_in_it() -> None:
    engine, batch = small_engine()
    arbiter = Gate()
    engine._rank.recorder._arbiter = arbiter  # type: ignore[union-attr,assignment]

    def loss(module: torch.nn.Module, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        arbiter.counted = {name: count + 2 * MS for name, count in arbiter.counted.items()}
        return module(**micro_batch).sum()

    for _ in range(2):
        engine.run([batch, batch], loss)
        breakdown = engine.breakdown()
        assert breakdown.preemptions == 4 * MS
        assert breakdown.pp_delayed_ms == breakdown.dp_held_ms == 4
    engine.close()


class Shards:
    """Counts what the test says, and has an exchange to report where records are kept."""

    def __init__(self) -> None:
        self.counted = {"waited_ns": 0, "hidden_ns": 0, "bytes": 0}
        self.keeps = False

    def counters(self) -> dict[str, int]:
        return dict(self.counted)

    def keep_records(self, keep: bool) -> None:
        self.keeps = keep

    def take_waits(self) -> list[tuple[int, int]]:
        return [(time.monotonic_ns(),) * 2] if self.keeps else []

    def take_records(self) -> list[tuple[str, int, int, int, int]]:
        now = time.monotonic_ns()
        return [("all-reduce", now, now, now, 8)] if self.keeps else []


def test_a_step_s_account_has_the_tp_sync_counted_in_it_and_records_where_somebody_asks() -> None:
    engine, batch = small_engine()
    shards = Shards()
    engine._rank.recorder._shards = shards  # type: ignore[union-attr,assignment]

    def loss(module: torch.nn.Module, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.02)
        shards.counted = {"waited_ns": 5 * MS, "hidden_ns": 2 * MS, "bytes": 8}
        return module(**micro_batch).sum()

    def after_a_step() -> tuple[bool, tuple[float | None, float | None, int]]:
        shards.counted = dict.fromkeys(shards.counted, 0)
        engine.run([batch], loss)
        shards.counted = dict.fromkeys(shards.counted, 10**12)  # as an evaluation has it
        breakdown = engine.breakdown()
        has = {lane for lane, *_ in breakdown.records} >= {"tp_sync", "wait"}
        return has, (breakdown.exposed_tp_ms, breakdown.hidden_tp_ms, breakdown.tp_bytes)

    assert after_a_step() == (False, (5, 2, 8))
    engine.record_tp_sync(True)
    assert after_a_step() == (True, (5, 2, 8))
    engine.record_tp_sync(False)
    assert after_a_step() == (False, (5, 2, 8))
    engine.close()


def test_exchanges_after_a_step_are_not_in_it() -> None:
    """As a checkpoint has them: what it waits for another rank is no part of the step."""
    engine, batch = small_engine()
    engine.run([batch], lambda module, micro_batch: module(**micro_batch).sum())
    now = time.monotonic_ns()
    engine._supervisor.progress.met(now, now + 10_000 * MS)  # type: ignore[union-attr]
    breakdown = engine.breakdown()
    assert breakdown.step_ms < 5_000 and breakdown.bubble_ms == 0
    engine.close()


def test_an_engine_that_is_closed_in_its_own_step_fails_in_good_order() -> None:
    engine, batch = small_engine()

    def loss(module: torch.nn.Module, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        engine.close()
        return module(**micro_batch).sum()

    with pytest.raises(ConfigError, match="closed in the middle of step 1"):
        engine.run([batch], loss)


def test_whoever_closes_an_engine_in_its_step_and_leaves_is_let_go() -> None:
    """As a signal's handler may."""
    engine, batch = small_engine()

    def loss(module: torch.nn.Module, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        engine.close()
        raise SystemExit(7)

    with pytest.raises(SystemExit, match="7"):
        engine.run([batch], loss)
