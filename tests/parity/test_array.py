"""The array itself: every pair of values that can be is in it, nothing that cannot be, and no setting is forgotten."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
import torch

import fold3d
from fold3d.engine.loss import loss_of
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.parity import covering
from tests.parity.__main__ import report
from tests.parity.settings import ELSEWHERE, RULES, SETTINGS, Rule, planned

ROWS = covering.read()
MOST_CASES = 45
"""A new value that takes more is to be weighed: each case is seconds of every run of the tests."""


def test_every_pair_that_can_be_stands_in_a_case() -> None:
    stand = set().union(*map(covering.pairs_of, ROWS))
    missing = sorted(covering.allowed() - stand, key=str)
    assert not missing, f"{len(missing)} pairs, such as {missing[0]}: python -m tests.parity --write"
    assert len(ROWS) <= MOST_CASES


def test_cases_keep_the_rules() -> None:
    broken = [(number, one.name) for number, row in enumerate(ROWS) for one in RULES if not one.allows(row)]
    assert not broken
    assert len({planned(row).name for row in ROWS}) == len(ROWS)


def test_every_pair_that_cannot_be_is_listed_with_the_rules() -> None:
    """Each is impossible by the rules that are named, and without any one of them it is possible."""
    excluded = covering.excluded()
    assert excluded.keys() | covering.allowed() == set(covering.all_pairs())
    for pair, rules in excluded.items():
        assert rules and covering.completed(dict(pair), rules) is None
        for one in rules:
            assert covering.completed(dict(pair), [other for other in rules if other is not one]) is not None
    lines = list(report(ROWS))
    for (one, value), (other, another) in excluded:
        assert f"    {one}={value} with {other}={another}" in lines


@pytest.mark.parametrize("one", RULES, ids=lambda one: one.name)
def test_each_rule_has_a_reason_and_an_effect(one: Rule) -> None:
    assert one.reason.endswith(".") and set(one.settings) <= SETTINGS.keys()
    verdicts = {one.holds(*values) for values in product(*(SETTINGS[name] for name in one.settings))}
    assert verdicts == {True, False}


def test_possible_pairs_are_found_by_search() -> None:
    """A pair is completed to a row that has it and keeps the rules, whichever rules are asked for."""
    for pair in covering.all_pairs()[::97]:
        row = covering.completed(dict(pair))
        assert row is None or (dict(pair).items() <= row.items() and all(one.allows(row) for one in RULES))
        free = covering.completed(dict(pair), [])
        assert free is not None and list(free) == list(SETTINGS)
    opposite = [
        Rule("a", ".", ("clip", "tied"), lambda a, b: a != b),
        Rule("b", ".", ("clip", "tied"), lambda a, b: a == b),
    ]
    assert covering.completed({"dp": 2}, opposite) is None


def test_every_setting_of_the_layout_stands_in_the_table() -> None:
    names = {field.name for field in fields(fold3d.ParallelConfig)}
    assert names - SETTINGS.keys() - ELSEWHERE.keys() == set(), "give it a line in tests/parity/settings.py"
    assert not SETTINGS.keys() & ELSEWHERE.keys() and ELSEWHERE.keys() <= names


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    covering.write(ROWS, tmp_path / "cases.csv")
    assert (tmp_path / "cases.csv").read_bytes() == covering.CASES.read_bytes()
    (tmp_path / "other.csv").write_text(covering.CASES.read_text().replace("zb_h1", "zb_h9"))
    with pytest.raises(ValueError, match="schedule=zb_h9"):
        covering.read(tmp_path / "other.csv")


@pytest.mark.parametrize("family", SETTINGS["family"])
def test_dropout_does_something(family: str) -> None:
    losses = []
    for dropout in (0.0, 0.1):
        torch.manual_seed(1)
        case = Case(family=family, dropout=dropout, dtype="float32")
        losses.append(loss_of(parity_jobs.build(case)(**parity_jobs.global_batch(case, 0))).item())
    assert abs(losses[0] - losses[1]) > 1e-4
