"""Job: what the planner is told about a training job; Hosts: on which machines its ranks are."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.costs import NetworkCosts, Profile
from fold3d.topology import LOOP
from fold3d.trace import Trace


@dataclass(frozen=True, slots=True)
class HostLink:
    """Bandwidth and latency."""

    bandwidth: float
    """Bytes per second, each way."""
    latency: float
    """Seconds of a small message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """By what machines are linked, for meshes to be compared. Ranks 0, 1 ... fill one host after the other, as torchrun
    numbers them."""

    per_host: int
    """Ranks of a host."""
    between: HostLink
    """What a host has to the others, all its ranks together."""
    within: HostLink
    """What a rank has to the others of its host."""
    toll: float = 0.0
    """As `NetworkCosts.toll`."""

    def network(self, world: int, tp: int) -> NetworkCosts:
        """Returns the links of a mesh with `tp` ranks in a tensor-parallel group, of `world` ranks."""
        sharing = min(tp, self.per_host)  # the ranks of a group send at the same time
        link = self.between if world > self.per_host else self.within
        bandwidth = link.bandwidth / sharing if world > self.per_host else link.bandwidth
        group = self.within if tp <= self.per_host else HostLink(bandwidth, self.between.latency)
        return NetworkCosts(
            pp_latency=link.latency,
            pp_bandwidth=bandwidth,
            dp_bandwidth=bandwidth,
            hop_latency=link.latency,
            tp_bandwidth=group.bandwidth,
            tp_latency=group.latency,
            toll=self.toll,
        )

    def of_places(self, dp: int, pp: int, tp: int) -> tuple[int, ...]:
        """Returns the host of each place replica * pp + stage, as `TrainingJob.hosts` has them; none where each
        place has its own, or all are on one."""
        if tp >= self.per_host or dp * pp * tp <= self.per_host:
            return ()
        return tuple(place * tp // self.per_host for place in range(dp * pp))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A model, measured, on a cluster, measured."""

    trace: Trace
    profile: Profile
    network: NetworkCosts
    dp: int
    """Replicas."""
    pp: int
    """Stages."""
    tp: int = 1
    """Ranks that share the weights of a stage of a replica; the profile is that of one of them."""
    style: str = LOOP
    """On which stages the chunks live: what the schedule asks for, where it is fixed."""
    micro_batches: int
    """Per step and replica."""
    samples: int | None = None
    """Of a micro-batch; None: nobody knows, or they cannot be divided."""
    one_sample: Profile | None = None
    """What a micro-batch of one sample costs; None: nobody has looked."""
    memory_limit: int | None = None
    """Bytes that a rank may use for weights, gradients, optimizer and activations; None: any."""
    slice_bytes: int | None = None
    """DP.sync can be paused for PP.sync every so many bytes; None: as the runtime does it on these links."""
    preempt: bool = True
    """Whether it is."""
    action_seconds: float = 0.0
    """Spent on every forward and backward of a chunk besides computing."""
    bucket_seconds: float = 0.0
    """Spent on every reduce-scatter and gather besides sending."""
    copy_bandwidth: float = 25e9
    """Bytes per second between a device and its pool, both directions together."""
    pool_is_elsewhere: bool = False
    """Whether the pool is no part of the memory that is limited. Else nothing leaves for it unless the user says so."""
    host_is_elsewhere: bool = False
    """Whether the host's memory is no part of it."""
    may_split: bool = True
    """Whether a backward can run in two halves: what is compiled, or has shards, does not."""
    offload_optimizer: bool = False
    """Whether the optimizer's state lies in host memory; the profile's `update_seconds` are then of updates there."""
    gradient_share: float = 1.0
    """Of the bytes of gradients, as they are kept, what is sent."""
    gradient_delay: int = 0
    """Steps until the optimizer takes them."""
    flush: bool = True
    """Whether the pipeline runs empty between steps. False: for schedule 1f1b with one segment."""
    delay_correction: str = "none"
    """What makes up for the delay; see ParallelConfig."""
    pool_limit: int | None = None
    """Bytes of a rank's pool; None: any."""
    links: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Bytes per second of the messages over each border between chunks, forward and backward, of a cut that is fixed;
    None: `network.pp_bandwidth`."""
    stage_times: tuple[float, ...] = ()
    """How long the ranks of each stage take, relative to the profile; empty: as long."""
    hosts: tuple[int, ...] = ()
    """Of each place replica * pp + stage, as numbers that only tell hosts apart; those of a host share
    `network.bandwidth`, and what stays inside costs its latency. Empty: a host for each."""
