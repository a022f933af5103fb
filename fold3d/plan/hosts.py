"""Hosts: on which machines the ranks of a job are, and by what they are linked, for meshes that are to be compared."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.costs import NetworkCosts


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth and latency."""

    bandwidth: float
    """Bytes per second, each way."""
    latency: float
    """Seconds of a small message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Ranks 0, 1 ... fill one host after the other, as torchrun numbers them."""

    per_host: int
    """Ranks of a host."""
    between: Link
    """What a host has to the others, all its ranks together."""
    within: Link
    """What a rank has to the others of its host."""
    toll: float = 0.0
    """As `NetworkCosts.toll`."""

    def network(self, world: int, tp: int) -> NetworkCosts:
        """Returns the links of a mesh with `tp` ranks in a tensor-parallel group, of `world` ranks."""
        sharing = min(tp, self.per_host)  # the ranks of a group send at the same time
        link = self.between if world > self.per_host else self.within
        bandwidth = link.bandwidth / sharing if world > self.per_host else link.bandwidth
        group = self.within if tp <= self.per_host else Link(bandwidth, self.between.latency)
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
        """Returns the host of each place replica * pp + stage, as `Job.hosts` has them; none where each place has its
        own, or all are on one."""
        if tp >= self.per_host or dp * pp * tp <= self.per_host:
            return ()
        return tuple(place * tp // self.per_host for place in range(dp * pp))
