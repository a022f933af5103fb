"""partition() against all divisions there are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fold3d.schedule import partition


def parts_of(cost: list[float], begins: list[int]) -> list[float]:
    return [sum(cost[a:b]) for a, b in zip(begins, [*begins[1:], len(cost)], strict=True)]


def value(parts: list[float]) -> tuple[float, float]:
    return max(parts), sum(part * part for part in parts)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=10), st.data())
def test_as_good_as_brute_force(cost: list[float], data: st.DataObject):
    """Whole-number costs: equal values are equal exactly."""
    parts = data.draw(st.integers(1, len(cost)))
    begins = partition(cost, parts)
    assert begins[0] == 0 and len(begins) == parts
    assert all(a < b for a, b in zip(begins, [*begins[1:], len(cost)], strict=True))
    every = ([0, *cuts] for cuts in combinations(range(1, len(cost)), parts - 1))
    assert value(parts_of(cost, begins)) == min(value(parts_of(cost, begins)) for begins in every)


def test_even_blocks_are_spread_evenly():
    sizes = parts_of([1.0] * 10, partition([1.0] * 10, 4))
    assert sorted(sizes) == [2, 2, 3, 3]


def test_a_large_model_is_no_problem():
    cost = [float(1 + i % 7) for i in range(400)]
    assert len(partition(cost, 64)) == 64


@pytest.mark.parametrize("parts", [0, 4])
def test_more_parts_than_blocks(parts: int):
    with pytest.raises(ValueError, match=f"cannot divide 3 blocks into {parts} non-empty parts"):
        partition([1.0, 1.0, 1.0], parts)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_are_numbers(cost: float):
    with pytest.raises(ValueError, match="finite number >= 0"):
        partition([1.0, cost], 1)
