"""What a divided block runs is compared in every forward: ordinary models on batches of many forms are left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.dist import watch_jobs
from tests.helpers.ranks import RankPool

LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {"tp_overlap": "none", "segments": 1, "recompute": "none"},
    "sub, blocks again": {"tp_overlap": "sub", "segments": 1, "recompute": "blocks"},
    "segments, chunks again": {"tp_overlap": "none", "segments": 2, "schedule": "aiao", "recompute": "full"},
    "sub, segments, chunks again": {"tp_overlap": "sub", "segments": 2, "schedule": "aiao", "recompute": "full"},
}


CASES = [
    (family, layout)
    for family in watch_jobs.FAMILIES
    for layout in LAYOUTS
    if family != "t5" or LAYOUTS[layout]["segments"] == 1  # with tp a model of two stacks is not cut
]


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_ordinary_models_are_left_alone(ranks: RankPool, family: str, layout: str) -> None:
    for trained in ranks.run(watch_jobs.train, 2, family, LAYOUTS[layout], timeout=200.0):
        assert trained.error == ""
        assert all(map(math.isfinite, trained.losses))
        assert trained.proofs == 0, "what comes later has been seen before"
