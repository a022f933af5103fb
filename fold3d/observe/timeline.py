"""The timeline of one step over all ranks: its events, a one-line summary, Chrome trace JSON for Perfetto.

It takes, per rank, the records of `step_breakdown.gather_records`: lane (one of LANES), action (text, "2F0"), start
and end (ns, one clock for all ranks, any origin), bytes (payload, 0 for computation). Ranks are numbered as `Topology`
does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fold3d import _C
from fold3d.observe.step_breakdown import TP_SYNC, RawRecord, StepBreakdown, make_breakdown, waits_for_dp_sync
from fold3d.plan.simulator import RankBreakdown
from fold3d.topology import coordinates, segment_of

Records = Sequence[Sequence[RawRecord]]

LANES = (
    "compute",
    "wait",
    "send_f",
    "recv_f",
    "send_b",
    "recv_b",
    "reduce",
    "gather",
    "tp_sync",
    "offload",
    "prefetch",
)
"""Top to bottom, wherever they are shown."""
_ACTION = re.compile(r"(?P<chunk>\d+)(?P<kind>[A-Z_]+?)(?P<micro_batch>\d*)$")
CATEGORY = {"F": "forward", "RECOMPUTE": "forward again", "B": "backward", "I": "backward", "W": "backward"}
_US = 1e3  # nanoseconds in Chrome's time unit


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One record with its action taken apart; times in nanoseconds after the first event of the step."""

    rank: int
    lane: str
    text: str
    start: int
    end: int
    bytes: int
    chunk: int
    kind: str
    micro_batch: int


def write_trace(
    path: str | Path,
    records: Records,
    *,
    pp: int,
    tp: int = 1,
    predicted_ms: float | None = None,
    memory: Sequence[_C.StageMemory] = (),
) -> None:
    """Writes the step as Chrome trace: process = rank, thread = lane, arrows from each SEND to its RECV.

    Each rank carries its breakdown in milliseconds, as label and in `otherData`. The file appears whole or not at all.
    Called by one rank.

    Args:
        predicted_ms: what the simulator said the step takes; None: nothing.
        memory: what it said of each stage's memory over the step; empty: nothing.
    """
    events = events_of(records)
    breakdowns = _accounts(events)
    out: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        at = coordinates(rank, pp, tp)
        name = f"rank {rank} (dp {at.dp}, stage {at.pp}{f', tp {at.tp}' if tp > 1 else ''})"
        out += [
            _meta("process_name", rank, 0, name=name),
            _meta("process_sort_index", rank, 0, sort_index=rank),
            _meta("process_labels", rank, 0, labels=_label(breakdowns[rank])),
        ]
        out += _counters(rank, memory[at.pp]) if memory else []
        present = {event.lane for event in events if event.rank == rank}
        for row, lane in enumerate(LANES):
            if lane not in present:
                continue
            out += [
                _meta("thread_name", rank, row, name=lane),
                _meta("thread_sort_index", rank, row, sort_index=row),
            ]
    for event in events:
        out.append(
            {
                "name": event.text,
                "cat": CATEGORY.get(event.kind, event.lane),
                "ph": "X",
                "pid": event.rank,
                "tid": LANES.index(event.lane),
                "ts": event.start / _US,
                "dur": (event.end - event.start) / _US,
                **_tint(event),
                "args": {
                    "chunk": event.chunk,
                    "segment": segment_of(event.chunk, pp),
                    "micro_batch": event.micro_batch,
                    "bytes": event.bytes,
                },
            }
        )
    for number, (send, receive) in enumerate(_transfers(events, pp, tp)):
        # An arrow may not end before it begins nor outside its slice; clocks agree only to a barrier's time.
        landing = max(receive.start, min(send.start, receive.end - 1))
        for event, phase, time in ((send, "s", send.start), (receive, "f", landing)):
            arrow = {"name": send.text, "cat": "transfer", "ph": phase, "id": number, "pid": event.rank}
            out.append(arrow | {"tid": LANES.index(event.lane), "ts": time / _US, "bp": "e"})
    about = {
        "summary": _summary(list(breakdowns.values()), predicted_ms),
        "predicted_step_ms": predicted_ms,
        "breakdowns": {rank: _transfers_of(breakdown) for rank, breakdown in breakdowns.items()},
    }
    text = json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": out})
    write_atomically(path, lambda temporary: Path(temporary).write_text(text))


def _counters(rank: int, memory: _C.StageMemory) -> list[dict[str, Any]]:
    """Returns a track of bytes over the step, stacked by what they are for."""
    names = _C.memory_use_names()
    return [
        {
            "name": "memory, predicted",
            "ph": "C",
            "pid": rank,
            "ts": point.time_ns / _US,
            "args": dict(zip(names, point.uses, strict=True)),
        }
        for point in memory.points
    ]


def _tint(event: TimelineEvent) -> dict[str, str]:
    """Returns the colour of a wait, in Chrome's words."""
    if event.lane != "wait":
        return {}
    if event.text == TP_SYNC:
        return {"cname": "bad"}
    return {"cname": "terrible" if waits_for_dp_sync(event.text) else "grey"}


def _transfers_of(breakdown: StepBreakdown) -> dict[str, float]:
    """Returns what the records tell, from the first to the last of any rank; DP.sync of the step before may be among
    them, so this is no step's length, as in the logs."""
    names = ["compute_ms", "bubble_ms", "pp_exposed_ms", "pp_hidden_ms", "dp_exposed_ms", "dp_hidden_ms"]
    names += ["tp_exposed_ms", "tp_hidden_ms", "offload_exposed_ms", "offload_hidden_ms"]
    numbers = breakdown.log(dp=2, pp=2, tp=2)
    return {"timeline_ms": numbers["step_ms"], **{name: numbers[name] for name in names if name in numbers}}


def _label(breakdown: StepBreakdown) -> str:
    tp_sync = ""
    if breakdown.exposed_tp_ms is not None and breakdown.hidden_tp_ms is not None:
        tp_sync = f"TP.sync exposed {breakdown.exposed_tp_ms:.1f}, hidden {breakdown.hidden_tp_ms:.1f} ms; "
    return (
        f"{tp_sync}DP.sync exposed {breakdown.exposed_dp_ms:.1f}, hidden {breakdown.hidden_dp_ms:.1f} ms; "
        f"PP.sync exposed {breakdown.exposed_pp_ms:.1f}, hidden {breakdown.hidden_pp_ms:.1f} ms; "
        f"bubble {breakdown.bubble_ms:.1f} ms"
    )


def summary(records: Records, predicted_ms: float | None = None) -> str:
    """Returns the step in one line: its length, the predicted one, and what the ranks did with it on average."""
    return _summary(list(_accounts(events_of(records)).values()), predicted_ms)


def _summary(breakdowns: Sequence[StepBreakdown], predicted_ms: float | None) -> str:
    return shares(breakdowns, predicted_ms, breakdowns[0].step_ms) if breakdowns else "nothing was recorded"


def shares(
    breakdowns: Sequence[StepBreakdown] | Sequence[RankBreakdown], predicted_ms: float | None, step: float | None = None
) -> str:
    """Returns what `breakdowns`, one of each rank, say of a step, in one line.

    Args:
        step: its milliseconds; None: the parts add up to it.
    """
    if step is None:
        first = breakdowns[0]
        step = first.compute_ms + (first.exposed_tp_ms or 0.0) + first.bubble_ms
        step += first.exposed_pp_ms + first.exposed_dp_ms + first.exposed_offload_ms

    def share(field: str) -> str:
        mean = sum(getattr(breakdown, field) or 0.0 for breakdown in breakdowns) / len(breakdowns)
        return f"{100 * mean / step:.1f} %" if step else "0 %"

    predicted = "" if predicted_ms is None else f" (predicted {predicted_ms:.1f})"
    parts = [
        f"step {step:.1f} ms{predicted} on {len(breakdowns)} rank(s): compute {share('compute_ms')}",
        f"bubble {share('bubble_ms')}",
        f"exposed PP.sync {share('exposed_pp_ms')}",
        f"exposed DP.sync {share('exposed_dp_ms')}",
        f"hidden DP.sync {share('hidden_dp_ms')}",
    ]
    sent, summed = (sum(getattr(a, field) for a in breakdowns) / 2**20 for field in ("pp_bytes", "dp_bytes"))
    sizes = f"PP {sent:.1f} MiB, DP {summed:.1f} MiB"
    measured = any(isinstance(one, StepBreakdown) and one.exposed_tp_ms is not None for one in breakdowns)
    if not measured and any(breakdown.exposed_tp_ms for breakdown in breakdowns):
        parts.append(f"exposed TP.sync {share('exposed_tp_ms')}")
    if measured:
        parts += [f"exposed TP.sync {share('exposed_tp_ms')}", f"hidden TP.sync {share('hidden_tp_ms')}"]
        sizes += f", TP {sum(getattr(a, 'tp_bytes', 0) for a in breakdowns) / 2**20:.1f} MiB"
    if any(breakdown.exposed_offload_ms > 0 for breakdown in breakdowns):
        parts.append(f"exposed offload {share('exposed_offload_ms')}")
    return ", ".join(parts) + f"; {sizes}"


def _accounts(events: Sequence[TimelineEvent]) -> dict[int, StepBreakdown]:
    return {
        rank: make_breakdown(
            [(e.lane, e.text, e.start, e.end, e.bytes) for e in events if e.rank == rank], 0, last_ns(events)
        )
        for rank in sorted({event.rank for event in events})
    }


def events_of(records: Records) -> list[TimelineEvent]:
    """Returns the records of all ranks, taken apart and in order of start; ValueError for an unknown lane."""
    origin = min((start for mine in records for _, _, start, _, _ in mine), default=0)
    events = []
    for rank, lane, text, start, end, size in ((rank, *record) for rank, mine in enumerate(records) for record in mine):
        match = _ACTION.match(text)
        if lane not in LANES:
            raise ValueError(f"lane {lane!r} of {text!r} is none of {', '.join(LANES)}")
        events.append(
            TimelineEvent(
                rank=rank,
                lane=lane,
                text=text,
                start=start - origin,
                end=end - origin,
                bytes=size,
                chunk=int(match["chunk"]) if match else 0,
                kind=match["kind"] if match else text,
                micro_batch=int(match["micro_batch"] or -1) if match else -1,
            )
        )
    return sorted(events, key=lambda event: (event.start, event.rank))


def last_ns(events: Sequence[TimelineEvent]) -> int:
    """Returns the length of the step in nanoseconds."""
    return max((event.end for event in events), default=0)


def _transfers(events: Sequence[TimelineEvent], pp: int, tp: int) -> list[tuple[TimelineEvent, TimelineEvent]]:
    """Returns every SEND with its RECV: chunk c's output is chunk c+1's input, gradients go the other way."""

    def lane(event: TimelineEvent) -> tuple[int, int]:
        at = coordinates(event.rank, pp, tp)
        return at.dp, at.tp

    received = {
        (lane(event), event.chunk, event.kind, event.micro_batch): event
        for event in events
        if event.lane in ("recv_f", "recv_b")
    }
    pairs = []
    for send in events:
        if send.lane not in ("send_f", "send_b"):
            continue
        chunk = send.chunk + (1 if send.lane == "send_f" else -1)
        receive = received.get((lane(send), chunk, send.kind.replace("SEND", "RECV"), send.micro_batch))
        if receive is not None:
            pairs.append((send, receive))
    return pairs


def _meta(kind: str, rank: int, row: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": args}


def write_atomically(path: str | Path, write: Callable[[str], object]) -> None:
    """Calls `write` with a temporary name beside `path`, then renames: nobody ever sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
