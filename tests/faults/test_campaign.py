"""Faults on one rank, at every moment of a training: a named error everywhere, and the same command goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.campaign import Campaign, campaign
from tests.faults.cases import Case, cases, of_the_gate

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def judge() -> Iterator[Campaign]:
    with campaign() as made:
        yield made


def test_there_are_enough() -> None:
    assert len(cases()) >= 200 and len({case.name for case in cases()}) == len(cases())


@pytest.mark.gate
@pytest.mark.parametrize("case", of_the_gate(), ids=lambda case: case.name)
def test_of_the_gate(judge: Campaign, case: Case) -> None:
    judge.judge(case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_of_the_campaign(judge: Campaign, case: Case) -> None:
    judge.judge(case)
