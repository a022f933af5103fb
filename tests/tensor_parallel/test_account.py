"""What is counted of TP.sync: alike over connections of our own and over a process group of torch's."""

from __future__ import annotations

import time

import pytest

from fold3d.observe.step_breakdown import TP_SYNC
from fold3d.tensor_parallel.region import REDUCE
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.test_group import TRANSPORTS, all_of, gathered, mine, reduced, summed

MS = 1_000_000


def late_and_hidden(over_tcp: bool) -> tuple[dict[str, int], dict[str, int], list[str], int]:
    """Waits 200 ms for the other rank, then computes for 400 ms while it is 200 ms late."""
    with all_of(over_tcp) as (sync, group):
        x = mine(group.rank, 300, 100)
        summed(group, x)
        before = sync.counters()
        sync.keep_records(True)
        if group.rank == 1:
            time.sleep(0.2)
        summed(group, x)
        waited = {name: value - before[name] for name, value in sync.counters().items()}
        before = sync.counters()
        if group.rank == 1:
            time.sleep(0.2)
        wait = group.start(x, REDUCE, REDUCE.forward)
        time.sleep(0.4)
        wait()
        hidden = {name: value - before[name] for name, value in sync.counters().items()}
        gathered(group, x, 0)
        reduced(group, x, 0)
        records = sync.take_records()
        assert all(issued <= start <= end for _, issued, start, end, _ in records)
        waits = sync.take_waits()
        assert not sync.take_records() and not sync.take_waits()
        sync.keep_records(False)
        summed(group, x)
        assert not sync.take_records() and not sync.take_waits()
        return waited, hidden, [kind for kind, *_ in records], sum(end - start for start, end in waits)


@pytest.mark.gate(cases=1)
@TRANSPORTS
def test_what_is_waited_for_and_what_is_hidden(ranks: RankPool, over_tcp: bool) -> None:
    results = ranks.run(late_and_hidden, 2, over_tcp)
    for waited, hidden, kinds, _ in results:
        assert kinds == ["all-reduce", "all-reduce", "all-gather", "reduce-scatter"]
        assert waited["exchanges"] == hidden["exchanges"] == 1
        assert waited["bytes"] == hidden["bytes"] == 300 * 100 * 8, "a ring of two sends as much as there is"
    waited, hidden, _, recorded = results[0]
    assert 150 * MS < waited["waited_ns"] <= recorded and waited["hidden_ns"] < 100 * MS
    assert 150 * MS < hidden["hidden_ns"] < 395 * MS and hidden["waited_ns"] < 100 * MS
    assert results[1][0]["waited_ns"] < 150 * MS, "nobody was late for the late one"


def account_of_a_step(transport: str) -> tuple[dict[str, float], int, list[tuple[str, int]], int]:
    """Returns what the second step's breakdown says of TP.sync."""
    case = Case(tp=2, m=2, family="gpt2", tp_overlap="sub", sequence_parallel=False, transport=transport)
    engine = parity_jobs.engine_of(case)
    engine.step(parity_jobs.batch_of(engine, case, 0))
    engine.record_tp_sync(True)
    engine.step(parity_jobs.batch_of(engine, case, 1))
    breakdown = engine.breakdown()
    # In any order: over gloo several are under way, and each is recorded when it is done.
    exchanges = sorted((action, size) for lane, action, _, _, size in breakdown.records if lane == "tp_sync")
    waits = sum(end - start for lane, action, start, end, _ in breakdown.records if (lane, action) == ("wait", TP_SYNC))
    engine.close()
    return breakdown.log(dp=1, pp=1, tp=2), breakdown.tp_bytes, exchanges, waits


def test_a_step_s_account_has_the_same_exchanges_over_either(ranks: RankPool) -> None:
    by_transport = [ranks.run(account_of_a_step, 2, transport) for transport in ("auto", "c10d")]
    for over_tcp, over_gloo in zip(*by_transport, strict=True):
        assert over_tcp[1:3] == over_gloo[1:3] and over_tcp[1] > 0
    for shards in by_transport:
        for log, sent, exchanges, waits in shards:
            assert sent == sum(size for _, size in exchanges)
            assert log["tp_exposed_ms"] == pytest.approx(waits / MS, abs=0.2) and log["compute_ms"] > 0
            parts = sum(log[name] for name in ("compute_ms", "tp_exposed_ms", "other_ms"))
            assert log["step_ms"] == pytest.approx(parts, abs=1e-6)
        for part in ("tp_exposed_ms", "tp_hidden_ms"):  # who is always late waits for nobody
            assert max(log[part] for log, *_ in shards) > 0
