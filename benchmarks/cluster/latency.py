"""pp_latency_ms(): how long messages between stages are under way, from the records of all ranks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import Record

_ACTION = re.compile(r"(\d+)(F|B|RECV_F|RECV_B)(\d+)")


def pp_latency_ms(scenario: Scenario, records: Sequence[Sequence[Record]]) -> float | None:
    """Returns the median ms from a stage's having computed something to the next stage's having received it.

    Queueing at the sender and at the receiver is part of it. All ranks are on one machine and share its clock.

    Args:
        records: of each rank, in rank order.
    Returns: None when there are no records of messages.
    """
    made: dict[tuple[int, str, int, int], int] = {}  # replica, direction, chunk, micro-batch -> ns
    came: dict[tuple[int, str, int, int], int] = {}
    for rank, of_rank in enumerate(records):
        for _, action, _, end in of_rank:
            match = _ACTION.fullmatch(action)
            if match is None:
                continue
            chunk, kind, micro_batch = int(match[1]), match[2], int(match[3])
            direction = kind[-1]
            if kind.startswith("RECV"):
                sender = chunk - 1 if direction == "F" else chunk + 1
                came[rank // scenario.pp, direction, sender, micro_batch] = end
            else:
                made[rank // scenario.pp, direction, chunk, micro_batch] = end
    times = [(end - made[message]) / 1e6 for message, end in came.items() if message in made]
    return statistics.median(times) if times else None
