"""with_tp_sync(): what layers cost whose sums travel between the ranks that share their weights."""

from __future__ import annotations

from dataclasses import replace

from fold3d.plan.costs import Profile
from fold3d.plan.space.tp_overlap import layers_seconds, ring_seconds
from fold3d.sharding.plan import ShardingPlan
from fold3d.trace import Trace


def with_tp_sync(
    profile: Profile, trace: Trace, sharding: ShardingPlan, *, bandwidth: float, latency: float, overlap: str
) -> Profile:
    """Returns the costs of a rank with TP.sync that computing does not hide.

    A region of a block is summed behind each of its exits in the forward, and once, where it is entered, in the
    backward; what is summed is as large as what the block hands on. An embedding that is spread is summed in the
    forward, a head in the backward.

    Args:
        profile: what `of_a_shard` returned.
        bandwidth: bytes per second that a rank sends in its group.
        latency: of a message in the group, in seconds.
        overlap: "sub", "none", or "auto", which is the faster one for each layer.
    Raises: ConfigError for another way of hiding.
    """
    layers = len(trace.blocks)

    def longer(compute: float, sums: int, size: int) -> float:
        """Of one of the blocks in a row: the first one's and the last one's waits are everybody's."""
        if not sums:
            return compute
        sync = sums * ring_seconds(size, sharding.tp, bandwidth, latency)
        return layers_seconds(layers, compute, sync, overlap, sums) / layers

    forward, backward = list(profile.forward), list(profile.backward)
    for number, name in enumerate(trace.blocks):
        split, size = sharding.blocks.get(name), profile.activation_bytes[number]
        groups = () if split is None else split.groups
        forward[number + 1] = longer(forward[number + 1], sum(len(group.exits) for group in groups), size)
        backward[number + 1] = longer(backward[number + 1], len(groups), size)
    if sharding.vocabulary.embeddings:
        forward[0] += ring_seconds(profile.activation_bytes[0], sharding.tp, bandwidth, latency)
    if sharding.vocabulary.heads:
        backward[-1] += ring_seconds(profile.activation_bytes[-1], sharding.tp, bandwidth, latency)
    return replace(profile, forward=tuple(forward), backward=tuple(backward))
