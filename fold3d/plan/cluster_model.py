"""cluster_model(): what the simulator is told, made of Work (what chunks cost) and Cluster (where they run).

The planner makes both of a profile, the replanner of measured times, the command line and the benchmarks make them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat

from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.placement.buckets import cut_buckets
from fold3d.schedule.library import config_errors
from fold3d.topology import LOOP, stage_of

_NS = 1e9  # nanoseconds per second

Modes = Sequence[Sequence[str]]
"""Per stage: the way of DP.sync of each bucket, in forward order."""


@dataclass(frozen=True, slots=True)
class BucketCost:
    """Consecutive layers of a chunk whose gradients are summed together."""

    forward: float
    """Seconds of one micro-batch; of a measured chunk its share."""
    backward: float
    bytes: int
    """Of gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the chunks of a model compute and communicate; one entry per chunk, in order of chunks."""

    forward: tuple[float, ...]
    """Seconds for one micro-batch."""
    backward: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    """What a chunk sends to the next one for a micro-batch, and gets back as a gradient."""
    stash_bytes: tuple[int, ...] = ()
    """What a stash of a micro-batch copies to the pool, and back, where the schedule has its OFFLOAD; none: copies are
    free."""
    head: float = 0.0
    """Seconds, part of the last chunk's `backward`: that of the head, which is run in the forward where the rest of the
    backward does not follow at once."""
    forward_tp: tuple[float, ...] = ()
    """Seconds, part of `forward`: waiting for TP.sync; empty where there is none."""
    backward_tp: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    """Seconds of the whole optimizer update of a chunk on one rank; none: part of the forwards, or left out."""
    buckets: tuple[tuple[BucketCost, ...], ...] = ()
    """A chunk without trainable parameters has none. Without any entry, `layers` and `gradient_bytes` say it."""
    layers: tuple[int, ...] = ()
    """At least 1: a chunk's times and gradients are spread evenly over its layers."""
    gradient_bytes: tuple[int, ...] = ()
    style: str = LOOP
    """On which stages the chunks live."""

    @staticmethod
    def even(
        schedule: _C.Schedule,
        *,
        forward: float,
        backward: float,
        layers: int,
        activation_bytes: int,
        gradient_bytes: int,
        forward_tp: float = 0.0,
        backward_tp: float = 0.0,
    ) -> Work:
        """Returns the work of a model that is cut evenly: equal stages, segments that differ by at most a layer.

        Args:
            forward, backward: seconds of one micro-batch on one rank, all its segments together.
            forward_tp, backward_tp: parts of them that are waiting for TP.sync.
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
        return Work(
            forward=tuple(forward * n / layers for n in mine),
            backward=tuple(backward * n / layers for n in mine),
            forward_tp=tuple(forward_tp * n / layers for n in mine),
            backward_tp=tuple(backward_tp * n / layers for n in mine),
            layers=tuple(mine),
            activation_bytes=(activation_bytes,) * len(mine),
            gradient_bytes=tuple(gradient_bytes * n // layers for n in mine),
            style=schedule.style,
        )

    def in_buckets(self, bucket_bytes: int) -> Work:
        """Returns the same with `layers` joined to buckets of at least `bucket_bytes`, as in the runtime."""
        chunks = []
        for layers, size in zip(self.layers, self.gradient_bytes, strict=True):
            sizes = [size * (layer + 1) // layers - size * layer // layers for layer in range(layers)]
            cuts = cut_buckets(sizes, bucket_bytes)
            # Shares of the chunk's times: any unit will do.
            chunks.append(tuple(BucketCost(end - first, end - first, sum(sizes[first:end])) for first, end in cuts))
        return replace(self, buckets=tuple(chunks))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterCosts:
    """Ranks, hosts and network."""

    dp: int
    """Replicas."""
    bandwidth: float
    """Bytes per second of a host's network card, each way."""
    latency: float = 0.0
    """Seconds from the end of sending a PP.sync message to its arrival."""
    hop_latency: float | None = None
    """The same for a hop of DP.sync's rings and of the norm; None = latency."""
    links: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Bytes per second of the messages over each border between chunks, forward and backward; None: `bandwidth`."""
    copy_bandwidth: float = 25e9
    """Bytes per second between a device and its pool, each way: PCIe 4.0 with 16 lanes gives about so many."""
    copies_share: bool = False
    """Whether both directions together have no more."""
    gradient_share: float = 1.0
    """Of the bytes of gradients what is sent; parameters, which zero1 gathers, are sent whole."""
    gradient_delay: int = 0
    """1: gradients are taken a step later, and summed under all of it."""
    ranks_per_host: int = 1
    """Ranks replica * pp + stage are placed in order; those of one host share its card."""
    slice_bytes: int = 1 << 20
    """DP.sync may be paused for PP.sync every so many bytes."""
    preempt: bool = True
    """False: first come, first served, and a bucket's transfer is not interrupted."""
    toll: float = 0.0
    """Seconds that a rank computes longer for each byte that it sends meanwhile."""
    action_seconds: float = 0.0
    """Spent on every forward and backward of a chunk besides computing."""
    bucket_seconds: float = 0.0
    """Spent on every reduce-scatter and gather besides sending."""


def kind_of(modes: Modes) -> str:
    """Returns the one way of DP.sync that all buckets have, "mixed" if they differ, "early" if there are none."""
    kinds = {mode for stage in modes for mode in stage}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "early"


def cluster_model(
    work: Work,
    cluster: ClusterCosts,
    *,
    pp: int,
    dp_sync: str = "zero1",
    modes: Modes = (),
    layers_per_bucket: int = 1,
) -> _C.ClusterModel:
    """Returns what `_C.simulate_step` takes beside a schedule.

    Args:
        pp: stages.
        dp_sync: one of config.SIMULATED_DP_SYNC, or "mixed" for buckets that differ.
        modes: with "mixed", "early" or "zero1" of each bucket.
        layers_per_bucket: without work.buckets: layers whose gradients are summed together; 0 = a chunk is one bucket.
    Raises: ConfigError if the parts do not fit each other; what does not fit the schedule, `simulate_step` says.
    """
    if cluster.ranks_per_host < 1:
        raise ConfigError(f"ranks_per_host is {cluster.ranks_per_host}; a host has at least one rank")
    model = _C.ClusterModel()
    for name in ("dp", "bandwidth", "slice_bytes", "preempt", "gradient_delay", "copy_bandwidth", "copies_share"):
        setattr(model, name, getattr(cluster, name))
    for name in ("activation_bytes", "stash_bytes", "layers"):
        setattr(model, name, list(getattr(work, name)))
    for name in ("forward", "backward", "update"):
        setattr(model, f"{name}_ns", [_ns(seconds) for seconds in getattr(work, name)])
    if cluster.ranks_per_host > 1:
        model.hosts = [rank // cluster.ranks_per_host for rank in range(cluster.dp * pp)]
    if cluster.links is not None:
        model.forward_links, model.backward_links = (list(rates) for rates in cluster.links)
    model.latency_ns = _ns(cluster.latency)
    model.hop_latency_ns = _ns(cluster.latency if cluster.hop_latency is None else cluster.hop_latency)
    model.toll_ns = _NS * cluster.toll
    model.action_ns = _ns(cluster.action_seconds)
    model.bucket_ns = _ns(cluster.bucket_seconds)
    model.head_ns = min(_ns(work.head), model.backward_ns[-1])
    model.forward_tp_ns = _parts(work.forward_tp, model.forward_ns)
    model.backward_tp_ns = _parts(work.backward_tp, model.backward_ns)
    share = cluster.gradient_share
    model.gradient_bytes = [_sent(size, share, dp_sync) for size in work.gradient_bytes]
    model.layers_per_bucket = layers_per_bucket
    with config_errors():
        model.dp_sync = "early" if dp_sync == "mixed" else dp_sync
    if work.buckets:
        ways = [iter(modes[stage]) if dp_sync == "mixed" else repeat(dp_sync) for stage in range(pp)]
        model.buckets = [
            [
                (_ns(b.forward), _ns(b.backward), _sent(b.bytes, share, way), way == "zero1")
                for b, way in zip(buckets, ways[stage_of(chunk, pp, work.style)], strict=False)
            ]
            for chunk, buckets in enumerate(work.buckets)
        ]
    return model


def _sent(size: int, share: float, way: str) -> int:
    """Returns how many bytes of an all-reduce a bucket's sum and gather take, each half of it, one with the other."""
    return round(size * ((1 + share) / 2 if way == "zero1" else share))


def _ns(seconds: float) -> int:
    return round(_NS * seconds)


def _parts(seconds: Sequence[float], whole_ns: Sequence[int]) -> list[int]:
    """Returns parts of times: rounded by themselves they could be larger."""
    return [min(_ns(part), whole) for part, whole in zip(seconds, whole_ns, strict=True)] if seconds else []


def early_gathers_to_try(buckets: int, count: int) -> list[int]:
    """Returns about `count` numbers of early gathers of a stage with so many buckets, evenly spread, and "any" (-1)."""
    return [-1, *range(0, buckets, max(1, -(-buckets // count)))]


def fastest_early_gathers(
    schedule: _C.Schedule, model: _C.ClusterModel, numbers: Iterable[int], max_steps: int = 8
) -> int:
    """Returns that of `numbers`, early gathers per stage, with the shortest step; of equals the first."""

    def length(number: int) -> int:
        model.early_gathers = number
        return _C.simulate_step(schedule, model, max_steps, False).step_ns

    return min(numbers, key=length)
