"""Which tests `make test` runs: the same ones for every commit. `make test-full` runs the others, too.

A test of one process is in the gate unless it is marked `full`. A test of several processes (`dist`) is in it only when
it is marked `gate`. `gate(cases=2)` takes two of a test's parameters, spread evenly, and leaves the others to
`make test-full`. The gate is `-m "not full"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks as `full` every collected test that the gate leaves out. Call it when `dist` is marked."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        chosen = _in_the_gate(of_one_test)
        for item in of_one_test:
            if item not in chosen and item.get_closest_marker("full") is None:
                item.add_marker(pytest.mark.full)


def _in_the_gate(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns those of a test's cases that the gate runs."""
    candidates = [case for case in cases if case.get_closest_marker("full") is None]
    chosen = []
    for case in candidates:
        marker = case.get_closest_marker("gate")
        if marker is not None and "cases" in marker.kwargs:
            return spread(candidates, marker.kwargs["cases"])
        if marker is not None or case.get_closest_marker("dist") is None:
            chosen.append(case)
    return chosen


def spread(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """Returns `count` of the cases, evenly spread; all, where there are not more."""
    if count < 1:
        raise ValueError(f"gate(cases={count}): must be at least 1; a test that the gate leaves out is marked full")
    if count >= len(cases):
        return list(cases)
    return [cases[(2 * number + 1) * len(cases) // (2 * count)] for number in range(count)]
