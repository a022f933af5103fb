"""How TP.sync is hidden: sub-micro-batches take turns, products send pieces, or every sum is waited for; and how long
layers then take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fold3d import _C
from fold3d.config import AUTO, TP_WAYS
from fold3d.errors import ConfigError
from fold3d.plan.costs import Exchanges, NetworkCosts, TpExchange
from fold3d.plan.job import TrainingJob
from fold3d.plan.space.knob import Knob

_WHOLE_BYTES = _C.whole_exchange_bytes()

FUSED_SHARE = 0.25
"""Of what a region computes, the matrix products next to its borders: of a Llama's attention and MLP together, 4 of 13
in a forward (o_proj, down_proj) and 9 of 26 in a backward (the gradients of the weights of the others), less what has
to be there before the first piece goes, and after the last one has come."""


@dataclass(frozen=True, slots=True)
class TpInterval:
    """What a rank computes from one exchange to the next, and that exchange: of one micro-batch, in seconds."""

    compute: float
    sync: float
    fixed: float = 0.0
    """Part of `sync` that a part of a micro-batch takes as well: latencies."""


def seconds(regions: Sequence[TpInterval], overlap: str, parts: int = 2) -> float:
    """Returns how long one micro-batch takes through regions, of a forward or a backward.

    With "none" everything comes one after the other. With "sub" the sub-micro-batches take turns: each computes a
    region, starts its exchange and hands over; the link carries one exchange at a time; one that comes to an exchange
    that is not done waits for it (Merak, section 5.3, Figure 4(b)). Computing one of `parts` takes that part of
    `compute`. Of three, the second one begins a turn later (`SubPipeline`).
    With "fused" the matrix products next to a region's borders hide its exchange, as far as they take so long.

    Raises: ConfigError for another way.
    """
    if overlap == "none":
        return sum(region.compute + region.sync for region in regions)
    if overlap == "fused":
        return sum(region.compute + region.sync - fused_sync(region.compute, region.sync) for region in regions)
    if overlap != "sub":
        raise ConfigError(f"tp_overlap={overlap!r}: must be one of {', '.join(TP_WAYS)}")
    computed = link = 0.0
    arrived = [0.0] * parts
    late = 1 if parts > 2 else None
    for turn in range(len(regions) + (late is not None)):
        for part in range(parts):
            at = turn - (part == late)
            if not 0 <= at < len(regions):
                continue
            region = regions[at]
            computed = max(computed, arrived[part]) + region.compute / parts
            arrived[part] = computed
            if region.sync:
                link = arrived[part] = max(link, computed) + (region.sync - region.fixed) / parts + region.fixed
    return max(computed, *arrived)


def fused_sync(compute: float, sync: float) -> float:
    """Returns for how long an exchange runs while the products next to it, FUSED_SHARE of `compute`, run."""
    return min(sync, FUSED_SHARE * compute)


def layers_seconds(layers: int, regions: Sequence[TpInterval], overlap: str, parts: int = 2) -> float:
    """Returns how long equal layers of these regions take in a row; "auto" takes the fastest way.

    Raises: ConfigError for another way.
    """
    ways = TP_WAYS if overlap == AUTO else (overlap,)
    return min(seconds([*regions] * layers, way, parts) for way in ways)


def even_regions(
    compute: float, exchanges: Sequence[TpExchange], ranks: int, network: NetworkCosts
) -> list[TpInterval]:
    """Returns the regions of a layer whose computing is the same before each of its exchanges, but for those that
    follow another one.

    Args:
        compute: seconds of the layer.
        ranks: of the tensor-parallel group.
    """
    if not exchanges:
        return [TpInterval(compute, 0.0)]
    # Where all follow another one, the layer has no region of its own: what it computes comes first.
    computed = [not one.follows for one in exchanges] if not all(one.follows for one in exchanges) else None
    made = []
    for number, one in enumerate(exchanges):
        size, hops = traffic(one, ranks)
        fixed = hops * network.tp_latency
        share = (number == 0) if computed is None else computed[number] / sum(computed)
        made.append(TpInterval(compute * share, size / network.tp_bandwidth + fixed, fixed))
    return made


def toll(compute: float, exchanges: Sequence[TpExchange], ranks: int, network: NetworkCosts, overlap: str) -> float:
    """Returns the seconds that a layer computes longer for what its rank sends meanwhile."""
    if overlap == "none" or not network.tp_toll:
        return 0.0
    taken = network.tp_toll * sum(traffic(one, ranks)[0] for one in exchanges)
    if overlap != "fused":
        return taken
    regions = even_regions(compute, exchanges, ranks, network)
    sync = sum(region.sync for region in regions)
    hidden = sum(fused_sync(region.compute, region.sync) for region in regions)
    return taken * hidden / sync if sync else 0.0


def traffic(exchange: TpExchange, ranks: int) -> tuple[float, int]:
    """Returns the bytes that a rank sends in an exchange over a ring, and in how many hops one after the other."""
    around = ranks - 1
    if exchange.trips == 2 and exchange.bytes * around <= _WHOLE_BYTES:
        return exchange.bytes * around, around
    hops = exchange.trips * around
    return hops * exchange.bytes / ranks, hops


def _parse(text: str) -> str:
    if text not in (AUTO, *TP_WAYS):
        raise ValueError(f"must be one of {', '.join((AUTO, *TP_WAYS))}")
    return text


def _costs(job: TrainingJob, value: str) -> TrainingJob:
    """Returns the job with the waits for TP.sync in its layers' times; "auto" is the fastest way."""
    profile, ways = job.profile, TP_WAYS if value == AUTO else (value,)
    found = []
    for way in ways:
        factor = profile.halves_factor if way == "sub" else 1.0
        if factor is None:  # its micro-batches run whole, whatever is asked for
            way, factor = "none", 1.0
        computed, waited = [], []
        for layers, exchanges in ((profile.forward, profile.tp_forward), (profile.backward, profile.tp_backward)):
            longer = [factor * time for time in layers]
            for layer, own in enumerate(exchanges[1:-1], start=1):  # of the ends everything is waited for
                longer[layer] += profile.busy * toll(longer[layer], own, job.tp, job.network, way)
            computed.append(tuple(longer))
            waited.append(_exposed(job.network, job.tp, longer, exchanges, way, profile.sub_micro_batches))
        times = [
            tuple(map(sum, zip(of, waits, strict=True))) if waits else of
            for of, waits in zip(computed, waited, strict=True)
        ]
        found.append((sum(map(sum, times)), times, waited))
    _, (forward, backward), (exposed_forward, exposed_backward) = min(found, key=lambda one: one[0])
    return replace(
        job,
        profile=replace(
            profile,
            forward=forward,
            backward=backward,
            exposed_forward=exposed_forward,
            exposed_backward=exposed_backward,
        ),
    )


def _exposed(
    network: NetworkCosts, ranks: int, computed: Sequence[float], exchanges: Exchanges, way: str, parts: int
) -> tuple[float, ...]:
    """Returns the seconds that each layer waits for its exchanges."""
    blocks, waits = len(computed) - 2, []
    known: dict[tuple[int, tuple[TpInterval, ...]], float] = {}  # blocks are alike, mostly
    for number, (compute, own) in enumerate(zip(computed, exchanges, strict=False)):
        # One block of many in a row: what the first and the last one wait for is everybody's. The layers before and
        # after them have no neighbours of their kind.
        row, how = (blocks, way) if 0 < number <= blocks else (1, "none")
        regions = tuple(even_regions(compute, own, ranks, network))
        if (row, regions) not in known:
            known[row, regions] = max(0.0, layers_seconds(row, regions, how, parts) / row - compute)
        waits.append(known[row, regions])
    return tuple(waits)


KNOB = Knob(
    name="tp_overlap",
    help="how TP.sync is hidden: sub (halves of a micro-batch), fused (products send pieces), none, or auto",
    parse=_parse,
    candidates=lambda job: [way for way in reversed(TP_WAYS) if way != "sub" or job.profile.halves_factor is not None],
    default=AUTO,
    costs=_costs,
    flag=lambda value, strategy: None if value == AUTO else value,
    undecided=AUTO,
    needs_tp=True,
)
