"""What the gate runs: a part that marks choose, the same for every commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import gate

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
    import pytest

    @pytest.fixture
    def ranks(): return None

    def test_one_process(): pass

    @pytest.mark.full
    def test_left_out(): pass

    @pytest.mark.gate(cases=2)
    @pytest.mark.parametrize("number", range(9))
    def test_some(number): pass

    def test_several_processes(ranks): pass

    @pytest.mark.dist
    @pytest.mark.gate
    @pytest.mark.parametrize("number", range(2))
    def test_several_in_the_gate(number): pass

    @pytest.mark.gate(cases=1)
    @pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
    def test_one_of_several(ranks, number): pass
"""


def passed(pytester: pytest.Pytester, *options: str) -> set[str]:
    """Returns the names of the tests above that run with the project's own conftest."""
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    full: f\n    gate: g\n    dist: d\n    cuda: c\n")
    pytester.makepyfile(TESTS)
    lines = pytester.runpytest("-v", *options).outlines
    return {line.split("::")[1].split()[0] for line in lines if " PASSED" in line}


def test_marks_choose(pytester: pytest.Pytester) -> None:
    chosen = {"test_one_process", "test_some[2]", "test_some[6]", "test_one_of_several[0]"}
    chosen |= {"test_several_in_the_gate[0]", "test_several_in_the_gate[1]"}
    assert passed(pytester, "-m", "not full") == chosen
    everything = passed(pytester)
    assert chosen < everything and len(everything) == 1 + 1 + 9 + 1 + 2 + 3
    assert passed(pytester, "-m", "full") == everything - chosen


@pytest.mark.parametrize("length, count, wanted", [(3, 3, [0, 1, 2]), (2, 5, [0, 1]), (7, 1, [3]), (10, 3, [1, 5, 8])])
def test_cases_are_spread(length: int, count: int, wanted: list[int]) -> None:
    assert gate.spread(list(range(length)), count) == wanted  # type: ignore[arg-type]


def test_none_is_no_number_of_cases() -> None:
    with pytest.raises(ValueError, match="marked full"):
        gate.spread([], 0)
