"""Which part of the tests that take turns is chosen."""

from __future__ import annotations

import pytest

from tests.dist.test_parity import EIGHT, GRID
from tests.helpers.rotation import PARTS, ROOT, VARIABLE, chosen, part_of


def test_the_commit_chooses_and_the_variable_overrides() -> None:
    assert chosen({}) == chosen({}) and chosen({}) in range(PARTS)
    assert chosen({VARIABLE: "3"}) == 3
    assert chosen({VARIABLE: "all"}) is None
    for wrong in ("-1", str(PARTS), "some", ""):
        with pytest.raises(ValueError, match=VARIABLE):
            chosen({VARIABLE: wrong})


def test_every_part_has_its_share_of_the_grid() -> None:
    counts = [0] * PARTS
    for case in GRID + EIGHT:
        counts[part_of(case.name)] += 1
    assert min(counts) >= len(GRID + EIGHT) / PARTS / 2, counts


@pytest.mark.parametrize("part", [*map(str, range(PARTS)), "all"])
def test_quick_and_slow_tests_are_all_tests(
    part: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the project's own conftest: what a part leaves out is slow, and nothing is in both."""
    monkeypatch.setenv(VARIABLE, part)
    pytester.makeini("[pytest]\nmarkers =\n    slow: s\n    rotating: r\n    dist: d\n    cuda: c\n")
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makepyfile(
        "import pytest\n\n@pytest.mark.rotating\n@pytest.mark.parametrize('n', range(40))\ndef test_turns(n): pass\n"
        "\ndef test_always(): pass\n\n@pytest.mark.slow\ndef test_slow(): pass\n"
    )
    slow, quick = (pytester.runpytest("-m", mark).parseoutcomes() for mark in ("slow", "not slow"))
    assert slow["passed"] + quick["passed"] == 42
    assert quick["passed"] == 1 if part == "all" else 1 < quick["passed"] < 25
