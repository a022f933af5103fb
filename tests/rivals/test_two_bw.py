"""PipeDream-2BW's planner against all configurations, and its closed forms on numbers done by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest

from fold3d.errors import ConfigError
from fold3d.rivals import EqualBlocks, TwoBwPlan, two_bw
from fold3d.rivals.two_bw import memory, throughput


def model(**changes: int) -> EqualBlocks:
    sizes = {"blocks": 8, "weight_bytes": 8, "state_bytes": 0, "activation_bytes": 40, "border_bytes": 1} | changes
    return EqualBlocks(seconds=lambda b: 3.0 + b, **sizes)  # larger micro-batches take less for a sample


def test_memory_of_the_closed_forms() -> None:
    """Section 3.3.3: 2 W / p + A + p a; with recomputation A / p; one version where nothing is pipelined."""
    assert memory(model(), p=4, b=1, recompute=False) == 48
    assert memory(model(), p=4, b=1, recompute=True) == 18
    assert memory(model(), p=1, b=2, recompute=False) == 8 + 2 * 40
    assert memory(model(state_bytes=12), p=4, b=1, recompute=True) == 18 + 3


def test_throughput_of_the_closed_forms() -> None:
    links = {"in_pipeline": 4.0, "cross_pipeline": 2.0}
    # 5 / 4 computing, two borders of 2 * 2 bytes at 4 bytes a second; sums, 2 bytes at 2, in 4 micro-batches
    assert throughput(model(), d=2, p=4, b=2, batch=16, recompute=False, **links) == 4 / (5 / 4 + 2)
    assert throughput(model(), d=2, p=4, b=2, batch=16, recompute=True, **links) == pytest.approx(4 / (5 / 3 + 2))
    # One micro-batch between two updates: the sums of 800 bytes take longer than it.
    slow = throughput(model(weight_bytes=800), d=2, p=1, b=8, batch=16, recompute=False, **links)
    assert slow == 16 / (2 * (1 / 2) * 800 / 2)


@pytest.mark.parametrize("room, across", list(product((30, 60, 110, math.inf), (1.0, 50.0))))
def test_nothing_that_is_allowed_is_faster(room: float, across: float) -> None:
    workers, batch, per_host, within = 8, 24, 4, 100.0
    found = two_bw(
        model(),
        workers=workers,
        batch=batch,
        memory_bytes=room,
        workers_per_host=per_host,
        within=within,
        across=across,
    )
    rates: dict[tuple[int, int, bool], tuple[int, float]] = {}
    for d, p, recompute, b in product(range(1, 9), range(1, 9), (False, True), range(1, 25)):
        if d * p > workers or 8 % p or batch % (d * b) or batch // (d * b) < p:
            continue
        if memory(model(), p=p, b=b, recompute=recompute) > room:
            continue
        inside = within if d * p <= per_host else across
        cross = within if d <= per_host else across
        rate = throughput(
            model(), d=d, p=p, b=b, batch=batch, recompute=recompute, in_pipeline=inside, cross_pipeline=cross
        )
        rates[d, p, recompute] = b, rate  # of ascending b the largest stays
    best = max(rate for _, rate in rates.values())
    b, rate = rates[found.d, found.p, found.recompute]
    assert found.samples_per_second == rate == best and found.b == b
    assert found.memory_bytes <= room and found.accumulation == batch // (found.d * found.b)


def test_slow_links_between_hosts_want_a_pipeline_and_fast_ones_replicas() -> None:
    heavy = model(weight_bytes=4000)

    def plan(across: float) -> TwoBwPlan:
        return two_bw(
            heavy, workers=4, batch=16, memory_bytes=math.inf, workers_per_host=1, within=100.0, across=across
        )

    assert plan(1e6).p == 1 and plan(10.0).p > 1


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="no configuration of 2 workers that fits into 5 bytes"):
        two_bw(model(), workers=2, batch=4, memory_bytes=5, workers_per_host=2, within=1.0, across=1.0)
