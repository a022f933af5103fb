"""PipeDream's recurrence against all partitions, and what follows from a partition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from fold3d.errors import ConfigError
from fold3d.rivals import COSTS, LayerRow, Level, PipedreamPlan, Stage, pipedream


def row_of(seconds: list[int], sent: list[int], weights: list[int]) -> LayerRow:
    names = tuple(f"layer {number}" for number in range(len(seconds)))
    return LayerRow(
        names=names,
        seconds=tuple(map(float, seconds)),
        sent_bytes=tuple(map(float, sent)),
        parameter_bytes=tuple(map(float, weights)),
    )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to write `total` as so many positive numbers."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def time_of(
    row: LayerRow, levels: list[Level], cost: str, k: int, stages: tuple[tuple[int, int, int], ...]
) -> Fraction:
    """Of one way to divide layers and the components of level k: the slowest stage or transfer, for one input."""
    link = Fraction(levels[k].bandwidth)
    times = []
    for first, end, m in stages:
        weights = Fraction(sum(row.parameter_bytes[first:end]))
        bytes_sent = 2 * (m - 1) * weights / (m if cost == "ring" else 1)
        inside = least(row, levels, cost, k - 1, first, end) if k else Fraction(sum(row.seconds[first:end]))
        times.append(max(inside, bytes_sent / link) / m)
        if first:
            times.append(2 * Fraction(row.sent_bytes[first - 1]) / link)
    return max(times)


def ways(first: int, end: int, components: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Yields every way to divide layers [first, end) and so many components into stages."""
    for parts in range(1, min(end - first, components) + 1):
        for lengths in compositions(end - first, parts):
            for replicas in compositions(components, parts):
                borders = [first + sum(lengths[:number]) for number in range(parts + 1)]
                yield tuple(zip(borders, borders[1:], replicas, strict=False))


def least(row: LayerRow, levels: list[Level], cost: str, k: int, first: int, end: int) -> Fraction:
    """Of all ways. A transfer into the first of these layers is somebody else's."""
    shifted = LayerRow(
        names=row.names[first:end],
        seconds=row.seconds[first:end],
        sent_bytes=row.sent_bytes[first:end],
        parameter_bytes=row.parameter_bytes[first:end],
    )
    return min(time_of(shifted, levels, cost, k, stages) for stages in ways(0, end - first, levels[k].components))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("components", [(1,), (4,), (6,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_nothing_is_faster(cost: str, components: tuple[int, ...]) -> None:
    draw = random.Random(sum(components))
    for layers in (1, 2, 3, 5) if len(components) < 3 else (3,):
        for _ in range(4):
            row = row_of(
                [draw.randint(1, 9) for _ in range(layers)],
                [draw.randint(0, 30) for _ in range(layers)],
                [draw.choice((0, 1, 10, 100)) for _ in range(layers)],
            )
            levels = [Level(count, float(draw.choice((1, 4, 16)))) for count in components]
            plan = pipedream(row, levels, cost)
            assert plan.seconds == pytest.approx(float(least(row, levels, cost, len(levels) - 1, 0, layers)), rel=1e-12)
            assert plan.stages[0].first == 0 and plan.stages[-1].end == layers
            assert all(a.end == b.first for a, b in pairwise(plan.stages))
            workers = 1
            for count in components:
                workers *= count
            assert plan.workers == workers
            if len(levels) == 1:
                stages = tuple((stage.first, stage.end, stage.replicas) for stage in plan.stages)
                assert plan.seconds == pytest.approx(float(time_of(row, levels, cost, 0, stages)), rel=1e-12)


def test_weights_at_the_end_stay_on_one_worker() -> None:
    """VGG's kind: what computes has few weights and large outputs, what has weights computes little."""
    row = row_of([3, 3, 3, 1], [1, 1, 1, 0], [0, 0, 0, 1000])
    plan = pipedream(row, [Level(4, 10.0)])
    assert plan.name == "3-1" and plan.seconds == 3.0
    assert pipedream(row, [Level(4, 1e9)]).name == "4"  # sums cost nothing


def test_the_text_charges_replicas_more_than_a_ring_costs() -> None:
    row = row_of([4, 4], [0, 0], [4, 4])
    ring, text = (pipedream(row, [Level(2, 1.0)], cost) for cost in COSTS)
    assert ring.name == "2" and ring.seconds == 4.0  # 2 (m - 1) / m W / B = 8 seconds beside 8 of computing
    assert text.name == "straight" and text.seconds == 4.0
    assert pipedream(row, [Level(4, 1.0)], "text").seconds >= pipedream(row, [Level(4, 1.0)]).seconds


@pytest.mark.parametrize(
    "replicas, noam, in_flight",
    [
        ((2, 1), 2, (2, 1)),
        ((15, 1), 2, (2, 1)),
        ((1, 1, 1, 1), 4, (4, 3, 2, 1)),
        ((2, 1, 1), 2, (2, 2, 1)),
        ((16,), 1, (1,)),
    ],
)
def test_inputs_in_flight(replicas: tuple[int, ...], noam: int, in_flight: tuple[int, ...]) -> None:
    plan = PipedreamPlan(1.0, tuple(Stage(number, number + 1, count) for number, count in enumerate(replicas)))
    assert plan.noam == noam and tuple(count + 1 for count in plan.warm_up) == in_flight
    assert plan.name == ("straight" if set(replicas) == {1} else "-".join(map(str, replicas)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cost": "tree"}, "cost='tree': set it to one of ring, text"),
        ({"levels": []}, "there is no level"),
        ({"levels": [Level(0, 1.0)]}, "a level has 0 components"),
        ({"levels": [Level(2, 0.0)]}, "the bandwidth of a level is 0"),
        ({"row": row_of([], [], [])}, "the model has no layer"),
        ({"row": row_of([1, -1], [0, 0], [0, 0])}, "a layer costs -1"),
        ({"row": row_of([1, 1], [0], [0, 0])}, "times of 2 layers and bytes of 1"),
    ],
)
def test_what_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipedream(**({"row": row_of([1], [0], [0]), "levels": [Level(1, 1.0)]} | change))  # type: ignore[arg-type]
