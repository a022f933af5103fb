"""How long layers take whose TP.sync is hidden, or is not. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d.config import AUTO, TP_OVERLAP
from fold3d.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Region:
    """What a rank computes from one exchange to the next, and that exchange: of one micro-batch, in seconds."""

    compute: float
    sync: float


def seconds(regions: Sequence[Region], overlap: str) -> float:
    """Returns how long one micro-batch takes through regions, of a forward or a backward.

    With "none" everything comes one after the other. With "sub" each of two halves computes a region, starts its
    exchange and hands over; the link carries one exchange at a time; a half that comes to an exchange that is not done
    waits for it (Merak, section 5.3, Figure 4(b)). Half a micro-batch takes half as long, which is less than true for
    small ones.

    Raises: ConfigError for another way.
    """
    if overlap == "none":
        return sum(region.compute + region.sync for region in regions)
    if overlap != "sub":
        raise ConfigError(f"tp_overlap={overlap!r}: must be one of {', '.join(TP_OVERLAP)}")
    computed = link = 0.0
    arrived = [0.0, 0.0]
    for region in regions:
        for half in (0, 1):
            computed = max(computed, arrived[half]) + region.compute / 2
            if region.sync:
                link = max(link, computed) + region.sync / 2
                arrived[half] = link
            else:
                arrived[half] = computed
    return max(computed, *arrived)


def even_regions(layers: int, compute: float, sync: float, per_layer: int = 2) -> list[Region]:
    """Returns the regions of equal layers, `per_layer` each (attention and MLP), all alike.

    Args:
        compute: seconds of a layer.
        sync: seconds of all of a layer's exchanges, when nothing hides them.
    """
    return [Region(compute / per_layer, sync / per_layer)] * (layers * per_layer)


def layers_seconds(layers: int, compute: float, sync: float, overlap: str, per_layer: int = 2) -> float:
    """Returns how long equal layers take in a row, as `even_regions` has them; "auto" takes the faster way.

    Raises: ConfigError for another way.
    """
    ways = TP_OVERLAP if overlap == AUTO else (overlap,)
    return min(seconds(even_regions(layers, compute, sync, per_layer), way) for way in ways)


def ring_seconds(size: int, ranks: int, bandwidth: float, latency: float) -> float:
    """Returns how long an all-reduce takes over a ring: 2 (ranks - 1) hops of a share each.

    Args:
        size: bytes that every rank has.
        bandwidth: bytes per second that a rank sends.
        latency: of a hop, in seconds.
    """
    hops = 2 * (ranks - 1)
    return hops * (size / ranks / bandwidth + latency)
