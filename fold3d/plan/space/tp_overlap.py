"""How TP.sync is hidden: sub-micro-batches take turns, products send pieces, or every sum is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fold3d.config import AUTO, TP_WAYS
from fold3d.plan.constraints import Constraints
from fold3d.plan.costs import Exchanges, NetworkCosts
from fold3d.plan.job import Job
from fold3d.plan.space.knob import Knob, SoFar
from fold3d.plan.space.tp_times import TpInterval, even_regions, layers_seconds, toll


def _parse(text: str) -> str:
    if text not in (AUTO, *TP_WAYS):
        raise ValueError(f"must be one of {', '.join((AUTO, *TP_WAYS))}")
    return text


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[str]:
    return [way for way in reversed(TP_WAYS) if way != "sub" or job.profile.halves_factor is not None]


def _costs(job: Job, value: str) -> Job:
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
                longer[layer] += toll(longer[layer], own, job.tp, job.network, way)
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
    candidates=_candidates,
    default=AUTO,
    costs=_costs,
    flag=lambda value, strategy: None if value == AUTO else value,
    undecided=AUTO,
    needs_tp=True,
)
