"""Simulator: what a training step takes on a cluster, and where its time goes; thin over csrc/core/sim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.placement.buckets import cut_buckets
from fold3d.schedule import parse_action

_NS = 1e9  # nanoseconds per second


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the chunks of a schedule compute and communicate; one entry per chunk, in order of chunks."""

    forward: tuple[float, ...]
    """Seconds for one micro-batch."""
    backward: tuple[float, ...]
    layers: tuple[int, ...]
    """At least 1: a chunk's times and gradients are spread evenly over its layers."""
    activation_bytes: tuple[int, ...]
    """What a chunk sends to the next one for a micro-batch, and gets back as a gradient."""
    gradient_bytes: tuple[int, ...]

    @classmethod
    def even(
        cls,
        schedule: _C.Schedule,
        *,
        forward: float,
        backward: float,
        layers: int,
        activation_bytes: int,
        gradient_bytes: int,
    ) -> Work:
        """Returns the work of a model that is cut evenly: equal stages, segments that differ by at most a layer.

        Args:
            forward, backward: seconds of one micro-batch on one rank, all its segments together.
            layers: of one rank.
            activation_bytes: between two chunks, for one micro-batch.
            gradient_bytes: of one rank.
        Raises: ConfigError if a rank has fewer layers than segments.
        """
        segments = schedule.segments
        if layers < segments:
            raise ConfigError(f"{layers} layers per rank cannot be cut into {segments} segments; use fewer segments")
        borders = [layers * segment // segments for segment in range(segments + 1)]
        mine = [end - begin for begin, end in pairwise(borders) for _ in range(schedule.pp)]
        return cls(
            forward=tuple(forward * n / layers for n in mine),
            backward=tuple(backward * n / layers for n in mine),
            layers=tuple(mine),
            activation_bytes=(activation_bytes,) * len(mine),
            gradient_bytes=tuple(gradient_bytes * n // layers for n in mine),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Ranks, hosts and network."""

    dp: int
    """Replicas."""
    bandwidth: float
    """Bytes per second of a host's network card, each way."""
    latency: float = 0.0
    """Seconds from the end of sending a PP.sync message to its arrival."""
    hop_latency: float | None = None
    """The same for a hop of DP.sync's rings and of the vote; None = latency."""
    ranks_per_host: int = 1
    """Ranks replica * pp + stage are placed in order; those of one host share its card."""
    slice_bytes: int = 1 << 20
    """DP.sync may be paused for PP.sync every so many bytes."""
    preempt: bool = True
    """False: first come, first served, and a bucket's transfer is not interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBreakdown:
    """One rank's step: compute + bubble + exposed_pp + exposed_dp = the step; milliseconds."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A simulated step in steady state; milliseconds."""

    step_ms: float
    limit_ms: float
    """max(compute + bubble, what the busiest network card has to carry): no way of hiding gets below."""
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
    records: tuple[tuple[dict[str, str | int], ...], ...]
    """Per rank what the timeline shows (fold3d.observe.timeline); empty unless asked for."""


def predict(
    schedule: _C.Schedule,
    work: Work,
    cluster: Cluster,
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
    model = _model(schedule, work, cluster)
    try:
        model.dp_sync = dp_sync
        model.layers_per_bucket = layers_per_bucket
        if bucket_bytes is not None:
            model.buckets = _cut(work, bucket_bytes)
        early = dp_sync in ("early", "unvoted")
        if early and early_gathers is None:
            early_gathers = _best_early_gathers(schedule, model, max_steps)
        model.early_gathers = early_gathers if early and early_gathers is not None else -1
        step = _C.simulate_step(schedule, model, max_steps, True, timeline)
    except ValueError as error:
        raise ConfigError(str(error)) from None
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


def step_ms(schedule: _C.Schedule, work: Work, cluster: Cluster, *, dp_sync: str = "zero1") -> float:
    """Returns only the step's milliseconds, several times faster than `predict`; for searches.

    With "early" and "unvoted", gathers begin whenever the network is idle. Raises: ConfigError as `predict`.
    """
    model = _model(schedule, work, cluster)
    try:
        model.dp_sync = dp_sync
        return _C.simulate_step(schedule, model, breakdown=False).step_ns / 1e6
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _model(schedule: _C.Schedule, work: Work, cluster: Cluster) -> _C.ClusterModel:
    if cluster.ranks_per_host < 1:
        raise ConfigError(f"ranks_per_host is {cluster.ranks_per_host}; a host has at least one rank")
    model = _C.ClusterModel()
    model.dp = cluster.dp
    if cluster.ranks_per_host > 1:
        model.hosts = [rank // cluster.ranks_per_host for rank in range(cluster.dp * schedule.pp)]
    model.bandwidth = cluster.bandwidth
    model.latency_ns = round(cluster.latency * _NS)
    model.hop_latency_ns = round((cluster.latency if cluster.hop_latency is None else cluster.hop_latency) * _NS)
    model.slice_bytes = cluster.slice_bytes
    model.preempt = cluster.preempt
    model.forward_ns = _nanoseconds(work.forward)
    model.backward_ns = _nanoseconds(work.backward)
    model.layers = list(work.layers)
    model.activation_bytes = list(work.activation_bytes)
    model.gradient_bytes = list(work.gradient_bytes)
    return model


def _nanoseconds(seconds: Sequence[float]) -> list[int]:
    return [round(second * _NS) for second in seconds]


def _cut(work: Work, bucket_bytes: int) -> list[list[tuple[int, int, int, bool]]]:
    """Returns the buckets of every chunk: shares of forward and backward, bytes, not zero1."""
    chunks = []
    for layers, size in zip(work.layers, work.gradient_bytes, strict=True):
        sizes = [size * (layer + 1) // layers - size * layer // layers for layer in range(layers)]
        cuts = cut_buckets(sizes, bucket_bytes)
        chunks.append([(end - first, end - first, sum(sizes[first:end]), False) for first, end in cuts])
    return chunks


def _best_early_gathers(schedule: _C.Schedule, model: _C.ClusterModel, max_steps: int) -> int:
    """Returns the number with the shortest step; of equals the smallest, which leaves the network most freedom."""
    size = model.layers_per_bucket
    buckets = [len(parts) for parts in model.buckets]
    if not buckets:
        buckets = [1 if size == 0 else -(-layers // size) for layers in model.layers]
    most = max(sum(buckets[stage :: schedule.pp]) for stage in range(schedule.pp))
    best, shortest = 0, 0
    for number in range(most):
        model.early_gathers = number
        length = _C.simulate_step(schedule, model, max_steps, False).step_ns
        if number == 0 or length < shortest:
            best, shortest = number, length
    return best


def _breakdown(rank: _C.RankBreakdown) -> RankBreakdown:
    return RankBreakdown(
        compute_ms=rank.compute_ns / 1e6,
        bubble_ms=rank.bubble_ns / 1e6,
        exposed_pp_ms=rank.exposed_pp_ns / 1e6,
        exposed_dp_ms=rank.exposed_dp_ns / 1e6,
        hidden_dp_ms=rank.hidden_dp_ns / 1e6,
        pp_bytes=rank.pp_bytes,
        dp_bytes=rank.dp_bytes,
    )


def _records(step: _C.TrainingStep) -> tuple[tuple[dict[str, str | int], ...], ...]:
    ranks: list[list[dict[str, str | int]]] = [[] for _ in step.ranks]
    free = [0] * len(ranks)  # since when the rank computes nothing
    gathered = {(span.rank, span.end_ns) for span in step.spans if span.text.endswith("GATHER")}
    for span in step.spans:
        mine = ranks[span.rank]
        if span.lane == "compute":
            begin, free[span.rank] = free[span.rank], span.end_ns
            if begin < span.start_ns:
                text = _awaited(span, (span.rank, span.start_ns) in gathered)
                mine.append(_record(span.rank, "wait", text, begin, span.start_ns, 0))
        lane = "gather" if span.text.endswith("GATHER") else span.lane  # the simulator's rings carry both
        mine.append(_record(span.rank, lane, span.text, span.start_ns, span.end_ns, span.bytes))
    return tuple(tuple(rank) for rank in ranks)


def _awaited(span: _C.SimulatedSpan, gathered: bool) -> str:
    """Returns what a rank was idle for before it computed `span`: DP.sync, or another stage."""
    action = parse_action(span.text)
    forward = action.kind == _C.Kind.FORWARD
    if forward and (gathered or action.chunk == 0):  # nothing but DP.sync holds up the first chunk
        return f"{action.chunk}GATHER"
    return f"{action.chunk}RECV_{'F' if forward else 'B'}{action.micro_batch}"


def _record(rank: int, lane: str, action: str, start: int, end: int, size: int) -> dict[str, str | int]:
    return {"rank": rank, "lane": lane, "action": action, "start_ns": start, "end_ns": end, "bytes": size}
