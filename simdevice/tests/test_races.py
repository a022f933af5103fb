"""The detector reports each planted race, naming both accesses, and nothing in the same program without it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.ranks import RankPool

SOURCE = Path(__file__).with_name("races.py")
"""Read and not imported: it registers the device."""
NAMES = [
    node.name
    for node in ast.parse(SOURCE.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_race_is_reported(name: str, sim_ranks: RankPool) -> None:
    ((without, with_it, want),) = sim_ranks.run("simdevice.tests.races:check", 1, name)
    assert not without, "found in the program without the mistake:\n" + "\n".join(without)
    assert any(re.search(f"race on the simulated device: {want}", text) for text in with_it), (want, with_it)


def test_there_are_enough_of_them() -> None:
    assert len(NAMES) >= 15


def test_a_clean_training_is_not_reported(sim_ranks: RankPool) -> None:
    assert sim_ranks.run("simdevice.tests.races:clean_programs", 1) == [[]]
