"""Latency: how long messages between stages are under way, from the records of all ranks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import Record
from fold3d.topology import coordinates

_ACTION = re.compile(r"(\d+)(F|B|RECV_F|RECV_B)(\d+)")
_DP_LANES = ("reduce", "gather")
_NS_PER_MS = 1e6
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Of a run. A message's latency: from a stage's having computed something to the next stage's having received it;
    queueing at both ends is part of it. Milliseconds, medians over messages; None: no such message."""

    alone_ms: float | None
    """Of messages during which no end was in DP.sync."""
    beside_dp_ms: float | None
    """Of messages during all of which at least one end was in DP.sync."""
    dp_sync_ms: float | None
    """How long a rank was in DP.sync per step, median over the ranks; None without DP.sync."""
    messages: tuple[int, int] = (0, 0)
    """How many messages the first two are medians of."""


def measure_latency(scenario: Scenario, records: Sequence[Sequence[Sequence[Record]]]) -> Latency:
    """Returns the latency of the messages in a run.

    Args:
        records: of each rank, in rank order, of each step; empty where a system keeps none. All ranks are on one
            machine and share its clock.
    """
    dp_sync = [_union([(s, e) for step in rank for lane, _, s, e in step if lane in _DP_LANES]) for rank in records]
    alone: list[float] = []
    beside: list[float] = []
    for sender, start, receiver, end in _messages(scenario, records):
        if any(_covers(dp_sync[rank], (start, end)) for rank in (sender, receiver)):
            beside.append((end - start) / _NS_PER_MS)
        elif not any(_touches(dp_sync[rank], (start, end)) for rank in (sender, receiver)):
            alone.append((end - start) / _NS_PER_MS)
    busy = [
        sum(end - start for start, end in spans) / _NS_PER_MS / len(rank)
        for spans, rank in zip(dp_sync, records, strict=True)
        if spans
    ]
    return Latency(
        alone_ms=_median(alone),
        beside_dp_ms=_median(beside),
        dp_sync_ms=_median(busy),
        messages=(len(alone), len(beside)),
    )


def _messages(scenario: Scenario, records: Sequence[Sequence[Sequence[Record]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (sending rank, ns, receiving rank, ns)."""
    made: dict[tuple[int, int, str, int, int], tuple[int, int]] = {}
    came: dict[tuple[int, int, str, int, int], tuple[int, int]] = {}
    for rank, steps in enumerate(records):
        for step, of_step in enumerate(steps):
            for _, action, _, end in of_step:
                match = _ACTION.fullmatch(action)
                if match is None:
                    continue
                chunk, kind, micro_batch = int(match[1]), match[2], int(match[3])
                direction = kind[-1]
                if kind.startswith("RECV"):
                    sender = chunk - 1 if direction == "F" else chunk + 1
                    came[step, coordinates(rank, scenario.pp).dp, direction, sender, micro_batch] = rank, end
                else:
                    made[step, coordinates(rank, scenario.pp).dp, direction, chunk, micro_batch] = rank, end
    for message, arrival in came.items():
        if message in made:
            yield *made[message], *arrival


def _union(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _covers(spans: Sequence[Span], one: Span) -> bool:
    return any(start <= one[0] and one[1] <= end for start, end in spans)


def _touches(spans: Sequence[Span], one: Span) -> bool:
    return any(start < one[1] and one[0] < end for start, end in spans)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
