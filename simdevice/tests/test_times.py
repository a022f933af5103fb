"""What is recorded of a device is when the device did it, the planner takes that, and nobody waits for it.

Kernels that sleep take at least their time, however busy the machine is, and launching them takes the host a small part
of it. How late a thread wakes up moves time from one span to the next, so lengths are compared in sums.
"""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import Any

import torch

from fold3d import _C
from tests.helpers.ranks import RankPool

TIMES = "simdevice.tests.times"
ENOUGH = 0.8
"""Of the time for which kernels slept: the rest may have gone to the span before."""
CLOCK_NS = 1000
"""By which times that were taken in one order may come out in the other: they are rounded."""


def spans(measured: Any, lane: str, pattern: str) -> dict[str, tuple[int, int]]:
    """Returns (start, end) by action."""
    return {
        action: (start, end)
        for of, action, start, end, _ in measured.records
        if of == lane and re.fullmatch(pattern, action)
    }


def check_lengths(measured: Any) -> None:
    for kind, slept in measured.slept_ms.items():
        took = sum(end - start for start, end in spans(measured, "compute", rf"\d+{kind}\d+").values()) / 1e6
        assert took >= ENOUGH * slept, (kind, took, slept)
    assert measured.compute_ms >= ENOUGH * sum(measured.slept_ms.values())
    lanes = [sorted(spans(measured, lane, ".*").values()) for lane in ("compute", "recv_f", "recv_b")]
    for lane in lanes:  # one after the other
        assert all(a[1] <= b[0] + CLOCK_NS for a, b in pairwise(lane)), lane


def test_messages_go_when_the_device_sends_them(sim_ranks: RankPool) -> None:
    """The host has launched it all long before."""
    first, last = sim_ranks.run(f"{TIMES}:of_a_step", 2, pp=2, segments=1, schedule="1f1b", timeout=150.0)
    for measured in (first, last):
        check_lengths(measured)
        assert measured.step_ms >= measured.compute_ms
    for sender, receiver, lanes, passes, kind in (
        (first, last, ("send_f", "recv_f"), "0F", "F"),
        (last, first, ("send_b", "recv_b"), "1B", "B"),
    ):  # each rank by itself: two clocks differ by how late threads woke up
        sent = spans(sender, lanes[0], ".*")
        arrived = spans(receiver, lanes[1], ".*")
        used = spans(receiver, "compute", rf"\d+{kind}\d+")
        waited = spans(receiver, "wait", ".*RECV.*")
        assert len(sent) == len(arrived) == 4
        between = max(end for _, end in arrived.values()) - min(end for _, end in arrived.values())
        assert between / 1e6 >= 0.5 * 0.75 * sender.slept_ms[kind], "one message for each pass of the sender"
        for number in range(4):
            start, end = sent[f"{passes[0]}SEND_{kind}{number}"]
            assert spans(sender, "compute", f"{passes}{number}")[f"{passes}{number}"][1] <= start + CLOCK_NS
            receive = f"{1 - int(passes[0])}RECV_{kind}{number}"
            came = arrived[receive]
            assert came[0] <= came[1] and start <= end
            assert came[1] <= used[f"{receive[0]}{kind}{number}"][0] + CLOCK_NS
            assert waited[receive][1] <= used[f"{receive[0]}{kind}{number}"][0] + CLOCK_NS


def test_sums_begin_when_gradients_are_there(sim_ranks: RankPool) -> None:
    for measured in sim_ranks.run(
        f"{TIMES}:of_a_step", 2, dp=2, segments=2, schedule="aiao", dp_sync="early", timeout=150.0
    ):
        check_lengths(measured)
        reduces = [record for record in measured.records if record[0] == "reduce"]
        assert reduces and any(record[0] == "gather" for record in measured.records)
        for _, action, start, end, _ in reduces:
            chunk = action[0]
            last = max(begun for begun, _ in spans(measured, "compute", rf"{chunk}B\d+").values())
            assert last <= start + CLOCK_NS <= end + CLOCK_NS, (action, start - last)


def test_a_step_has_its_own_records_whichever_is_asked_for_first(sim_ranks: RankPool) -> None:
    for last, before in sim_ranks.run(f"{TIMES}:forwards_of_two_steps", 2, dp=2, segments=2, timeout=150.0):
        assert last == before == [f"{chunk}F{m}" for chunk in range(2) for m in range(4)]


def test_nobody_waits_for_the_times(sim_ranks: RankPool) -> None:
    layout = {"dp": 2, "segments": 2, "schedule": "aiao", "dp_sync": "early"}
    for with_times, without in sim_ranks.run(f"{TIMES}:host_waits", 2, **layout, timeout=150.0):
        assert with_times == without > 0


def test_the_planner_takes_the_device_s_times(sim_ranks: RankPool) -> None:
    """And notices when they change."""
    layout = {"pp": 2, "segments": 1, "schedule": "1f1b"}
    phases = [(5, 1.0, 0.0), (12, 3.0, 0.0)]
    for before, after in sim_ranks.run(f"{TIMES}:predictions", 2, phases, **layout, timeout=150.0):
        shortest = (4.0 + 8.0) * 2 * 4 * ENOUGH  # of one stage
        assert before is not None and before >= shortest
        assert after is not None and after >= 3 * shortest


def test_the_planner_notices_that_sums_became_slower(sim_ranks: RankPool) -> None:
    """By the collectives' own times; what was measured of the network before training does not count any more."""
    layout = {"dp": 2, "segments": 1, "schedule": "1f1b", "dp_sync": "early"}
    bytes_sent = 4 * 256 * 257 * 4  # half of the gradients, twice
    phases = [(5, 0.25, bytes_sent / 0.03), (12, 0.25, bytes_sent / 0.3)]
    for before, after in sim_ranks.run(f"{TIMES}:predictions", 2, phases, **layout, timeout=150.0):
        computes = (4.0 + 8.0) * 4 * 4 * 0.25
        assert before is not None and before >= ENOUGH * computes
        assert after is not None and after >= ENOUGH * 300.0


def test_the_cpu_s_clock_is_the_host_s() -> None:
    clock = _C.StreamClock(torch.device("cpu"))
    assert clock.tells_time and not clock.is_of_device
    before = time.monotonic_ns()
    clock.anchor()
    now = clock.now()
    assert before <= now.wait() <= time.monotonic_ns() and now.ns() == now.wait()
