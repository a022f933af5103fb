"""Simulator: what a training step takes on a cluster, and where its time goes; thin over csrc/core/sim."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d import _C
from fold3d.plan.cluster_model import ClusterCosts, Work, cluster_model, fastest_early_gathers
from fold3d.schedule import parse_action
from fold3d.schedule.library import config_errors
from fold3d.topology import of_stage

Record = tuple[str, str, int, int, int]
"""(lane, action text, start_ns, end_ns, bytes), as a run records it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBreakdown:
    """One rank's step: compute + exposed_tp + bubble + exposed_pp + exposed_dp + exposed_offload = the step;
    milliseconds."""

    compute_ms: float
    bubble_ms: float
    """Idle if communication were free."""
    exposed_pp_ms: float
    """By which PP.sync alone makes the step longer."""
    exposed_dp_ms: float
    """By which DP.sync makes it longer still."""
    hidden_dp_ms: float
    """DP.sync on an idle network, less what is exposed."""
    pp_bytes: int
    """Sent through the network."""
    dp_bytes: int
    exposed_offload_ms: float = 0.0
    """By which copies to the pool and back make it longer still."""
    exposed_tp_ms: float = 0.0
    """Waiting for TP.sync in forwards and backwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A simulated step in steady state; milliseconds."""

    step_ms: float
    limit_ms: float
    """max(compute + TP.sync + bubble, what the busiest network card has to carry): no way of hiding gets below."""
    ranks: tuple[RankBreakdown, ...]
    """Of the replicas that differ: one, unless hosts hold parts of several."""
    early_gathers: int | None
    """The number per stage that the prediction is for; None if DP.sync does not gather early."""
    gather_order: tuple[tuple[int, ...], ...]
    """Per stage: its early buckets (numbers in forward order) in the order of their gathers."""
    preemptions: int
    """DP.sync paused for PP.sync, in all simulated steps."""
    longest_pp_wait_ms: float
    """From queueing a PP.sync message to its first byte."""
    steps: int
    """Simulated until two took the same time."""
    steady: bool
    """False: they never did; step_ms is that of the last one."""
    records: tuple[tuple[Record, ...], ...]
    """Per rank what the timeline shows (fold3d.observe.timeline); empty unless asked for."""


def predict(
    schedule: _C.Schedule,
    work: Work,
    cluster: ClusterCosts,
    *,
    dp_sync: str = "zero1",
    early_gathers: int | None = None,
    layers_per_bucket: int = 1,
    bucket_bytes: int | None = None,
    max_steps: int = 8,
    timeline: bool = False,
) -> Prediction:
    """Simulates training steps and returns the last one.

    Args:
        schedule: compute-only or lowered, with backwards.
        dp_sync: one of config.SIMULATED_DP_SYNC.
        early_gathers: with "early" and "unvoted", how many gathers a stage may begin before its last reduce-scatter is
            done; None tries all numbers and takes the fastest.
        layers_per_bucket: layers whose gradients are summed together; 0 = a chunk is one bucket.
        bucket_bytes: layers join until a bucket has at least so many bytes, as in the runtime; None: layers_per_bucket
            decides.
        max_steps: how long to wait for a steady state.
        timeline: fill Prediction.records.
    Raises: ConfigError if the parts do not fit each other.
    """
    if bucket_bytes is not None:
        work = work.in_buckets(bucket_bytes)
    model = cluster_model(work, cluster, pp=schedule.pp, dp_sync=dp_sync, layers_per_bucket=layers_per_bucket)
    early = dp_sync in ("early", "unvoted")
    with config_errors():
        if early and early_gathers is None:
            numbers = range(_most_buckets(work, schedule.pp, layers_per_bucket))
            early_gathers = fastest_early_gathers(schedule, model, numbers, max_steps)
        model.early_gathers = early_gathers if early and early_gathers is not None else -1
        step = _C.simulate_step(schedule, model, max_steps, True, timeline)
    return prediction_of(step, early_gathers=model.early_gathers if early else None, timeline=timeline)


def prediction_of(step: _C.TrainingStep, *, early_gathers: int | None, timeline: bool = False) -> Prediction:
    """Returns a simulated step, with its breakdown, in milliseconds."""
    return Prediction(
        step_ms=step.step_ns / 1e6,
        limit_ms=step.limit_ns / 1e6,
        ranks=tuple(_breakdown(rank) for rank in step.ranks),
        early_gathers=early_gathers,
        gather_order=tuple(tuple(numbers) for numbers in step.gather_order),
        preemptions=step.preemptions,
        longest_pp_wait_ms=step.longest_message_wait_ns / 1e6,
        steps=step.steps,
        steady=step.steady,
        records=_records(step) if timeline else (),
    )


def step_ms(schedule: _C.Schedule, work: Work, cluster: ClusterCosts, *, dp_sync: str = "zero1") -> float:
    """Returns only the step's milliseconds, several times faster than `predict`; for searches.

    With "early" and "unvoted", gathers begin whenever the network is idle. Raises: ConfigError as `predict`.
    """
    model = cluster_model(work, cluster, pp=schedule.pp, dp_sync=dp_sync)
    with config_errors():
        return _C.simulate_step(schedule, model, breakdown=False).step_ns / 1e6


def _most_buckets(work: Work, pp: int, layers_per_bucket: int) -> int:
    """Returns the number of buckets of the stage that has most."""
    counts = [len(buckets) for buckets in work.buckets]
    if not counts:
        counts = [1 if layers_per_bucket == 0 else -(-layers // layers_per_bucket) for layers in work.layers]
    return max(sum(of_stage(counts, stage, pp, work.style)) for stage in range(pp))


def _breakdown(rank: _C.RankBreakdown) -> RankBreakdown:
    times = ("compute", "bubble", "exposed_pp", "exposed_dp", "exposed_offload", "hidden_dp", "exposed_tp")
    milliseconds = {f"{name}_ms": getattr(rank, f"{name}_ns") / 1e6 for name in times}
    return RankBreakdown(**milliseconds, pp_bytes=rank.pp_bytes, dp_bytes=rank.dp_bytes)


def _records(step: _C.TrainingStep) -> tuple[tuple[Record, ...], ...]:
    ranks: list[list[Record]] = [[] for _ in step.ranks]
    free = [0] * len(ranks)  # since when the rank computes nothing
    gathered = {(span.rank, span.end_ns) for span in step.spans if span.text.endswith("GATHER")}
    for span in step.spans:
        mine = ranks[span.rank]
        if span.lane == "compute":
            begin, free[span.rank] = free[span.rank], span.end_ns
            if begin < span.start_ns:
                text = _awaited(span, (span.rank, span.start_ns) in gathered)
                mine.append(("wait", text, begin, span.start_ns, 0))
        lane = "gather" if span.text.endswith("GATHER") else span.lane  # the simulator's rings carry both
        mine.append((lane, span.text, span.start_ns, span.end_ns, span.bytes))
    return tuple(tuple(rank) for rank in ranks)


def _awaited(span: _C.SimulatedSpan, gathered: bool) -> str:
    """Returns what a rank was idle for before it computed `span`: DP.sync, or another stage."""
    action = parse_action(span.text)
    forward = action.kind == _C.Kind.FORWARD
    if forward and (gathered or action.chunk == 0):  # nothing but DP.sync holds up the first chunk
        return f"{action.chunk}GATHER"
    return f"{action.chunk}RECV_{'F' if forward else 'B'}{action.micro_batch}"
