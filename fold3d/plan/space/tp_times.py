"""How long layers take whose TP.sync is hidden, or is not. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d.config import AUTO, TP_OVERLAP, TP_WAYS
from fold3d.errors import ConfigError
from fold3d.plan.costs import NetworkCosts, TpExchange

_WHOLE_BYTES = 64 << 10
"""Up to so many bytes in all, an all-reduce goes round the ring once, with whole tensors (csrc/comm/tensor)."""


FUSED_SHARE = 0.25
"""Of what a region computes, the matrix products next to its borders: of a Llama's attention and MLP together, 4 of 13
in a forward (o_proj, down_proj) and 9 of 26 in a backward (the gradients of the weights of the others), less what has
to be there before the first piece goes, and after the last one has come."""


@dataclass(frozen=True, slots=True)
class Region:
    """What a rank computes from one exchange to the next, and that exchange: of one micro-batch, in seconds."""

    compute: float
    sync: float
    fixed: float = 0.0
    """Part of `sync` that half a micro-batch takes as well: latencies."""


def seconds(regions: Sequence[Region], overlap: str) -> float:
    """Returns how long one micro-batch takes through regions, of a forward or a backward.

    With "none" everything comes one after the other. With "sub" each of two halves computes a region, starts its
    exchange and hands over; the link carries one exchange at a time; a half that comes to an exchange that is not done
    waits for it (Merak, section 5.3, Figure 4(b)). Computing half a micro-batch takes half of `compute`.
    With "fused" the matrix products next to a region's borders, FUSED_SHARE of its computing, hide its exchange.

    Raises: ConfigError for another way.
    """
    if overlap == "none":
        return sum(region.compute + region.sync for region in regions)
    if overlap == "fused":
        return sum(region.compute + max(0.0, region.sync - FUSED_SHARE * region.compute) for region in regions)
    if overlap != "sub":
        raise ConfigError(f"tp_overlap={overlap!r}: must be one of {', '.join(TP_WAYS)}")
    computed = link = 0.0
    arrived = [0.0, 0.0]
    for region in regions:
        for half in (0, 1):
            computed = max(computed, arrived[half]) + region.compute / 2
            if region.sync:
                link = max(link, computed) + (region.sync + region.fixed) / 2
                arrived[half] = link
            else:
                arrived[half] = computed
    return max(computed, *arrived)


def layers_seconds(layers: int, regions: Sequence[Region], overlap: str) -> float:
    """Returns how long equal layers of these regions take in a row; "auto" takes the faster way.

    Raises: ConfigError for another way.
    """
    ways = TP_OVERLAP if overlap == AUTO else (overlap,)
    return min(seconds([*regions] * layers, way) for way in ways)


def even_regions(compute: float, exchanges: Sequence[TpExchange], ranks: int, network: NetworkCosts) -> list[Region]:
    """Returns the regions of a layer whose computing is the same before each of its exchanges.

    Args:
        compute: seconds of the layer.
        ranks: of the tensor-parallel group.
    """
    if not exchanges:
        return [Region(compute, 0.0)]
    made = []
    for one in exchanges:
        size, hops = traffic(one, ranks)
        fixed = hops * network.tp_latency
        made.append(Region(compute / len(exchanges), size / network.tp_bandwidth + fixed, fixed))
    return made


def traffic(exchange: TpExchange, ranks: int) -> tuple[float, int]:
    """Returns the bytes that a rank sends in an exchange over a ring, and in how many hops one after the other."""
    around = ranks - 1
    if exchange.trips == 2 and exchange.bytes * around <= _WHOLE_BYTES:
        return exchange.bytes * around, around
    hops = exchange.trips * around
    return hops * exchange.bytes / ranks, hops
