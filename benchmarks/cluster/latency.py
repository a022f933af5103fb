"""Latency: how long messages between stages are under way, from the records of all ranks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import Record

_ACTION = re.compile(r"(\d+)(F|B|RECV_F|RECV_B)(\d+)")
_NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Median ms from a stage's having computed something to the next stage's having received it; None: no message."""

    alone_ms: float | None
    """Of messages during which neither end summed gradients."""
    beside_dp_ms: float | None
    """Of messages during which one end did, at least for a part."""


def measure_latency(scenario: Scenario, records: Sequence[Sequence[Record]]) -> Latency:
    """Returns the latency of the messages in one step. Queueing at both ends is part of it.

    Args:
        records: of each rank, in rank order, empty where a system keeps none. All ranks are on one machine and share
            its clock.
    """
    made: dict[tuple[int, str, int, int], tuple[int, int]] = {}  # replica, direction, chunk, micro-batch -> ns, rank
    came: dict[tuple[int, str, int, int], tuple[int, int]] = {}
    sums: list[list[tuple[int, int]]] = []
    for rank, of_rank in enumerate(records):
        sums.append([(start, end) for lane, _, start, end in of_rank if lane == "reduce"])
        for _, action, _, end in of_rank:
            match = _ACTION.fullmatch(action)
            if match is None:
                continue
            chunk, kind, micro_batch = int(match[1]), match[2], int(match[3])
            direction = kind[-1]
            if kind.startswith("RECV"):
                sender = chunk - 1 if direction == "F" else chunk + 1
                came[rank // scenario.pp, direction, sender, micro_batch] = end, rank
            else:
                made[rank // scenario.pp, direction, chunk, micro_batch] = end, rank
    alone: list[float] = []
    beside: list[float] = []
    for message, (end, receiver) in came.items():
        if message in made:
            start, sender = made[message]
            busy = any(start < last and first < end for first, last in sums[sender] + sums[receiver])
            (beside if busy else alone).append((end - start) / _NS_PER_MS)
    return Latency(alone_ms=_median(alone), beside_dp_ms=_median(beside))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
