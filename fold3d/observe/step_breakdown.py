"""StepBreakdown: where one step's time went on this rank; StepOutput: what one optimizer step reports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fold3d.comms.world_group import WorldGroup
from fold3d.plan.simulator import RankBreakdown

if TYPE_CHECKING:
    from fold3d import _C


NS_PER_MS = 1e6
RawRecord = tuple[str, str, int, int, int]
"""(lane, action text, start_ns, end_ns, bytes); times are this process's monotonic clock."""


_COPY = re.compile("OFFLOAD|PREFETCH")
MEET = "MEET"
"""Action of a wait in a small exchange with other ranks: the loss, the norm."""
TP_SYNC = "TP_SYNC"
"""Action of a wait for TP.sync."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBreakdown:
    """Where the time of one step went on one rank. Times are in milliseconds, sizes in bytes."""

    step_ms: float
    """From the first action to the end of the optimizer's step, without updates that are left to the next forward; with
    the time in which a reader of weights waited for these before that forward."""
    compute_ms: float
    """Forward and backward passes, without the waits inside. Where waits for TP.sync are not known, with these."""
    bubble_ms: float
    """Waiting for other stages while no message was arriving, also in small exchanges (loss, norm)."""
    exposed_pp_ms: float
    """Waiting for activations or their gradients that were arriving."""
    hidden_pp_ms: float
    """Activations and their gradients arriving while the rank computed."""
    exposed_dp_ms: float
    """Waiting for DP.sync: for sums after the last backward, for parameters before a layer's forward, and in small
    exchanges while sums were under way."""
    hidden_dp_ms: float
    """DP.sync under way while the rank computed."""
    exposed_tp_ms: float | None
    """Waiting for TP.sync in forward and backward passes, also for late ranks of the group. None without tensor
    parallelism, and on GPUs, where the host does not wait for it."""
    hidden_tp_ms: float | None
    """TP.sync under way while the rank waited for none, such as one half's under the other's computation. None as for
    exposed_tp_ms."""
    preemptions: int
    """Number of slices of DP.sync that waited for a message of PP.sync."""
    pp_delayed_ms: float
    """By how much slices of DP.sync delayed messages of PP.sync, all messages together. 0.0 on GPUs, where the time in
    which NCCL's collectives send cannot be told from the time in which they wait for another replica."""
    dp_held_ms: float
    """How long slices of DP.sync were held back for messages: sending time that DP.sync lost, both rings and directions
    together."""
    exposed_offload_ms: float
    """Waiting for stashes to come back from the pool, or to leave for it."""
    hidden_offload_ms: float
    """Copies to the pool and back while the rank computed, both directions together."""
    offload_bytes: int
    """Bytes copied to the pool; as many come back."""
    stashes_peak_bytes: int
    """Most bytes that offloaded stashes had on the device at once, including those on their way out and back."""
    pool_peak_bytes: int
    """Most bytes that were in the pool at once."""
    pp_bytes: int
    """Bytes sent to other stages."""
    dp_bytes: int
    """Bytes sent to other replicas."""
    tp_bytes: int
    """Bytes sent to other ranks of the tensor-parallel group."""
    predicted_ms: float | None
    """The simulator's prediction of the step; None if nothing was measured for it."""
    predicted: RankBreakdown | None
    """Its prediction of where this rank's time goes; None as for predicted_ms."""
    records: tuple[RawRecord, ...]
    """All records of the step, for the timeline. DP.sync of the step before may end in this one."""

    def lasting(self, step_ms: float) -> StepBreakdown:
        """Returns the breakdown of a step that took longer than its actions: its batches were loaded before. So is the
        prediction then."""
        more = max(0.0, step_ms - self.step_ms)
        predicted = None if self.predicted_ms is None else self.predicted_ms + more
        return replace(self, step_ms=self.step_ms + more, predicted_ms=predicted)

    def log(self, *, dp: int, pp: int, tp: int = 1) -> dict[str, float]:
        """Returns the numbers that the Trainer logs, by log key (docs/log-keys.md), rounded to a tenth. Keys that a
        layout cannot have are left out.

        compute, tp_exposed, bubble, pp_exposed, dp_exposed, offload_exposed and other add up to step_ms exactly. other
        is the rest: loss, norm, an optimizer that steps by itself, and Python between actions.

        Args:
            dp, pp, tp: numbers of replicas, stages and ranks of a tensor-parallel group.
        """
        parts = {"compute_ms": self.compute_ms}
        beside: dict[str, float] = {}
        if tp > 1 and self.exposed_tp_ms is not None and self.hidden_tp_ms is not None:
            parts |= {"tp_exposed_ms": self.exposed_tp_ms}
            beside |= {"tp_hidden_ms": self.hidden_tp_ms}
        if pp > 1:
            parts |= {"bubble_ms": self.bubble_ms, "pp_exposed_ms": self.exposed_pp_ms}
            beside |= {"pp_hidden_ms": self.hidden_pp_ms}
        if dp > 1:
            parts |= {"dp_exposed_ms": self.exposed_dp_ms}
            beside |= {"dp_hidden_ms": self.hidden_dp_ms}
        if dp > 1 and pp > 1:
            beside |= {name: getattr(self, name) for name in ("preemptions", "pp_delayed_ms", "dp_held_ms")}
        if self.offload_bytes:
            parts |= {"offload_exposed_ms": self.exposed_offload_ms}
            beside |= {"offload_hidden_ms": self.hidden_offload_ms, "offload_gb": self.offload_bytes / 1e9}
        if self.predicted_ms is not None:
            beside |= {"predicted_step_ms": self.predicted_ms}
        told = self.predicted
        # Where nobody counts TP.sync, steps that were measured cannot tell it from computing.
        if told is not None and tp > 1 and (self.exposed_tp_ms is not None or told.exposed_tp_ms):
            beside |= {"predicted_tp_exposed_ms": told.exposed_tp_ms}
        if told is not None and pp > 1:
            beside |= {"predicted_bubble_ms": told.bubble_ms, "predicted_pp_exposed_ms": told.exposed_pp_ms}
        if told is not None and dp > 1:
            beside |= {"predicted_dp_exposed_ms": told.exposed_dp_ms, "predicted_dp_hidden_ms": told.hidden_dp_ms}
        rounded = {name: round(value, 1) for name, value in parts.items()}
        other = round(self.step_ms, 1) - sum(rounded.values())
        return {
            "step_ms": round(self.step_ms, 1),
            **rounded,
            "other_ms": round(other, 1),
            **{name: round(value, 3 if name.endswith("_gb") else 1) for name, value in beside.items()},
        }


def make_breakdown(
    records: Sequence[RawRecord],
    start_ns: int,
    end_ns: int,
    predicted_ms: float | None = None,
    arbiter: Mapping[str, int] | None = None,
    predicted: RankBreakdown | None = None,
    shards: Mapping[str, int] | None = None,
    offload: _C.OffloadCounters | None = None,
) -> StepBreakdown:
    """Returns the breakdown of one step from the records of its compute lane and its transfers.

    Args:
        predicted_ms, predicted: what the simulator says; None: nothing was measured to feed it.
        arbiter: what the host's arbiter counted in the step; None: there was none.
        shards: what TensorSync counted in its forwards and backwards; None: what the records have of TP.sync.
        offload: what the Offloader counted at the end; None: nothing left the device.
    """
    arbiter = arbiter or {}
    records = without_meetings_in_dp_sync(_idle_meetings(records, start_ns, end_ns))
    spans = [(lane, action, start, end) for lane, action, start, end, _ in records if end > start_ns]
    waits = [(action, start, end) for lane, action, start, end in spans if lane == "wait"]
    of_dp = [(start, end) for action, start, end in waits if waits_for_dp_sync(action)]
    of_pp = [(start, end) for action, start, end in waits if "RECV" in action]
    passes = [(start, end) for lane, _, start, end in spans if lane == "compute"]
    of_tp = [(start, end) for action, start, end in waits if action == TP_SYNC]
    compute = without(passes, [*of_dp, *of_tp])
    arriving = merged([(start, end) for lane, _, start, end in spans if lane in ("recv_f", "recv_b")])
    dp_sync = merged([(start, end) for lane, _, start, end in spans if lane in ("reduce", "gather")])
    exposed_pp = overlap_ns(of_pp, arriving)
    copied = merged([(start, end) for lane, _, start, end in spans if lane in ("offload", "prefetch")])
    met = [(start, end) for action, start, end in waits if action == MEET]
    tp_sync = merged([(start, end) for lane, _, start, end in spans if lane == "tp_sync"])
    exposed_tp, hidden_tp = _length(of_tp), overlap_ns(tp_sync, compute)
    computed, tp_bytes = _length(compute), sum(size for lane, _, _, _, size in records if lane == "tp_sync")
    if shards is not None:
        computed += exposed_tp  # the same waits, where the records have them
        exposed_tp, hidden_tp, tp_bytes = min(shards["waited_ns"], computed), shards["hidden_ns"], shards["bytes"]
        computed -= exposed_tp
    knows_tp = shards is not None or bool(tp_sync)
    return StepBreakdown(
        step_ms=(end_ns - start_ns) / NS_PER_MS,
        compute_ms=computed / NS_PER_MS,
        bubble_ms=(_length(of_pp) - exposed_pp + _length(met)) / NS_PER_MS,
        exposed_pp_ms=exposed_pp / NS_PER_MS,
        hidden_pp_ms=overlap_ns(arriving, compute) / NS_PER_MS,
        exposed_dp_ms=_length(of_dp) / NS_PER_MS,
        hidden_dp_ms=overlap_ns(dp_sync, compute) / NS_PER_MS,
        exposed_tp_ms=exposed_tp / NS_PER_MS if knows_tp else None,
        hidden_tp_ms=hidden_tp / NS_PER_MS if knows_tp else None,
        preemptions=arbiter.get("preemptions", 0),
        pp_delayed_ms=arbiter.get("delayed_ns", 0) / NS_PER_MS,
        dp_held_ms=arbiter.get("preempted_ns", 0) / NS_PER_MS,
        exposed_offload_ms=_length([(start, end) for action, start, end in waits if _COPY.search(action)]) / NS_PER_MS,
        hidden_offload_ms=overlap_ns(copied, compute) / NS_PER_MS,
        offload_bytes=sum(size for lane, _, _, _, size in records if lane == "offload"),
        stashes_peak_bytes=0 if offload is None else offload.device_peak,
        pool_peak_bytes=0 if offload is None else offload.pool_peak,
        pp_bytes=sum(size for lane, _, _, _, size in records if lane in ("send_f", "send_b")),
        dp_bytes=sum(size for lane, _, _, _, size in records if lane in ("reduce", "gather")),
        tp_bytes=tp_bytes,
        predicted_ms=predicted_ms,
        predicted=predicted,
        records=tuple(records),
    )


def _idle_meetings(records: Sequence[RawRecord], start_ns: int, end_ns: int) -> list[RawRecord]:
    """Returns the records; of small exchanges, in which the host waits, with those parts alone in which a device had
    nothing else to do or to wait for in the step."""
    spans, rest = _meetings(records)
    if not spans:
        return rest
    met = [(max(start, start_ns), min(end, end_ns)) for start, end in spans]
    busy = [(start, end) for lane, _, start, end, _ in rest if lane in ("compute", "wait")]
    return rest + [("wait", MEET, start, end, 0) for start, end in without(merged(met), busy) if start < end]


def _meetings(records: Sequence[RawRecord]) -> tuple[list[tuple[int, int]], list[RawRecord]]:
    """Returns when small exchanges were under way, and all other records."""
    met = [(start, end) for lane, action, start, end, _ in records if (lane, action) == ("wait", MEET)]
    return met, [record for record in records if record[:2] != ("wait", MEET)]


def waits_for_dp_sync(action: str) -> bool:
    """Returns whether a wait for this action is one for DP.sync."""
    return action.endswith(("REDUCE_GRAD", "GATHER"))


def without_meetings_in_dp_sync(records: Sequence[RawRecord]) -> list[RawRecord]:
    """Returns the records; what a small exchange took while DP.sync was under way has become a wait for DP.sync.

    Who is late there is a replica whose gradients this rank would wait for as well.
    """
    met, rest = _meetings(records)
    if not met:
        return rest
    dp_sync = merged([(start, end) for lane, _, start, end, _ in rest if lane in ("reduce", "gather")])
    alone = without(met, dp_sync)
    rest += [("wait", MEET, start, end, 0) for start, end in alone]
    rest += [("wait", "0REDUCE_GRAD", start, end, 0) for start, end in without(met, alone)]
    return rest


Spans = Sequence[tuple[int, int]]


def _length(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def merged(spans: Spans) -> list[tuple[int, int]]:
    """Returns the union of intervals as disjoint ones, ascending."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def without(spans: Spans, holes: Spans) -> list[tuple[int, int]]:
    """Returns what is left of disjoint intervals when those in `holes` are cut out."""
    out = []
    disjoint = merged(holes)
    for start, end in sorted(spans):
        for hole_start, hole_end in disjoint:
            if hole_end <= start or hole_start >= end:
                continue
            if start < hole_start:
                out.append((start, hole_start))
            start = hole_end
        if start < end:
            out.append((start, end))
    return out


def overlap_ns(first: Spans, second: Spans) -> int:
    """Returns for how long both lists of disjoint intervals are inside one of theirs, in their unit."""
    total, a, b = 0, sorted(first), sorted(second)
    i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def gather_records(records: Sequence[RawRecord], world: WorldGroup) -> list[list[RawRecord]] | None:
    """Returns all ranks' records, by rank, on one clock on rank 0, None elsewhere. Every rank of the job must call.

    Clocks of different machines are lined up at a barrier, so they agree to about the time a barrier takes.
    """
    world.barrier()
    origin = time.monotonic_ns()
    return world.gather([(lane, text, start - origin, end - origin, size) for lane, text, start, end, size in records])


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one optimizer step reports; the same on every rank, but for the breakdown."""

    loss: torch.Tensor
    """Loss of the global batch, scalar."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping, scalar, on the engine's device; reading its value waits for the step's
    kernels. With gradient_delay=1 it is that of the gradients that the step applied, those of the step before."""
    make_breakdown: Callable[[], StepBreakdown] = field(repr=False)
    """Makes `breakdown`."""

    @cached_property
    def breakdown(self) -> StepBreakdown:
        """Where this rank's time went. Computed when it is first read, which costs CPU time between steps."""
        return self.make_breakdown()
