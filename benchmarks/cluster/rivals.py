"""rival_costs(): what data parallelism of a whole model must send and can take, in closed form, whoever implements it.

What is measured over gloo has two handicaps that an accelerator's libraries do not have. fully_shard's collectives are
blocking on the CPU, whose backend has no streams. And gloo has no reduce-scatter: torch all-reduces everything, which
sends twice the bytes (ProcessGroupGloo::reduce_scatter_tensor_coalesced). These figures have neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster.scenarios import Scenario

WAYS = ("ddp", "zero2", "zero3", "hsdp", "hsdp-scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalCosts:
    """Of one step; bytes of payload that the busiest host sends, seconds at its link's full rate."""

    sent_bytes: float
    """What must be sent."""
    emulated_bytes: float
    """What gloo sends beside."""
    emulated_s: float
    """The time of that: no layer computes meanwhile."""
    least_s: float
    """A step in which what is sent travels beside the layers of the micro-batch that needs or makes it."""


def rival_costs(scenario: Scenario, way: str) -> RivalCosts:
    """Returns the costs of one of WAYS.

    A ring of collectives passes each host once, however many of its ranks are in it, so a host sends what a rank does.
    """
    ranks, shards = scenario.ranks, scenario.shards
    model = scenario.gradient_bytes * scenario.pp
    count = scenario.micro_batches // scenario.pp  # of a rank
    hybrid = way.startswith("hsdp")
    inside = 0.0 if scenario.ranks_per_host > 1 else model * (shards - 1) / shards  # hsdp's, where a host is one rank
    piece = inside if hybrid else model * (ranks - 1) / ranks  # an all-gather, or a reduce-scatter
    # Of hsdp, all ranks of a host send at once; where a host is one rank, it sends its shard alone.
    hosts, together = ranks // shards, 1 if scenario.ranks_per_host > 1 else shards
    across = 2 * (hosts - 1) / hosts * model / together if hybrid else 0.0
    gathers = {"ddp": 0, "zero3": 2 * count}.get(way, 1)
    scatters = count if way == "hsdp-scatter" else 1
    gather_s, across_s = (_seconds(scenario, size) for size in (piece, across))
    forward_s, backward_s = (seconds / count for seconds in (scenario.forward_s, scenario.backward_s))
    forwards = [forward_s] * count
    backwards = [0.0] * count  # of communication beside each
    for number in range(count):
        if way == "zero3" or (number == 0 and gathers):
            forwards[number] = max(forward_s, gather_s)
        backwards[number] += gather_s * (way == "zero3") + gather_s * (number >= count - scatters)
    backwards[-1] += gather_s * (way == "ddp") + across_s
    sent = piece * (gathers + scatters + (way == "ddp")) + across
    emulated = 0.0 if way == "ddp" else piece * scatters
    return RivalCosts(
        sent_bytes=sent,
        emulated_bytes=emulated,
        emulated_s=_seconds(scenario, emulated),
        least_s=sum(forwards) + sum(max(backward_s, beside) for beside in backwards),
    )


def _seconds(scenario: Scenario, size: float) -> float:
    return size * 8 / (scenario.rate_mbit * scenario.ranks_per_host * 1e6)
