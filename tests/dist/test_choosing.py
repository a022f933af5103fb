"""The batch chooses which modules run: a head, an adapter, a tower for images. Ranks compute what one process does.

Each replica records the model with its own first micro-batch, and these choose differently. What must hold: all
replicas sum the same parameters in the same buckets; a parameter that one of them does not use gets the sum of those
that do; one that nobody uses in a step does not move, whatever the weight decay.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import choosing_jobs as jobs
from tests.dist.parity_checks import TOLERANCE, assert_equal
from tests.dist.parity_jobs import Result
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "segments": 1},
    "dp2-zero1": {"dp": 2, "segments": 1, "dp_sync": "zero1", "bucket_bytes": 0},
    "dp2-s2-early": {"dp": 2, "segments": 2, "dp_sync": "early", "bucket_bytes": 300},
    "pp2": {"dp": 1, "pp": 2, "segments": 1},
    "pp2-s2": {"dp": 1, "pp": 2, "segments": 2},
    "dp2-pp2-zero1": {"dp": 2, "pp": 2, "segments": 1, "dp_sync": "zero1", "bucket_bytes": 300},
    "dp2-pp2-early": {"dp": 2, "pp": 2, "segments": 2, "dp_sync": "early", "bucket_bytes": 0},
    "dp2-auto": {"dp": 2},
}
SEEDS = [1, 2, 3]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluates"])
@pytest.mark.parametrize("kind", jobs.KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(ranks: RankPool, layout: str, kind: str, evaluates: bool) -> None:
    settings = LAYOUTS[layout]
    dp = settings["dp"]
    world = dp * settings.get("pp", 1)
    of_ranks = ranks.run(jobs.train, world, kind, SEEDS, evaluates=evaluates, timeout=300, **settings)
    for seed, *results in zip(SEEDS, *of_ranks, strict=True):
        expected = jobs.train_alone(kind, seed, dp)
        for result in results:
            if kind == "late_tower" and isinstance(result, str):  # in front of the cut, behind it in the model's order
                assert "tower" in result and "lies on another rank" in result
                continue
            assert isinstance(result, Result), result
            assert_equal(result, expected, TOLERANCE["float64"])


def unlike(count: int) -> list[int]:
    """Returns seeds with which the first micro-batch of one of two replicas has images."""
    first = {seed: jobs.batches(jobs.STACK, seed, 2)[0] for seed in range(20)}
    return [seed for seed, (one, other) in first.items() if ("images" in one[0]) != ("images" in other[0])][:count]


@pytest.mark.parametrize("layout", ["dp2-auto", "dp2-zero1"])
def test_replicas_that_run_other_blocks(ranks: RankPool, layout: str) -> None:
    """What is measured of layers is put together by their names, and the model stays whole."""
    seeds = unlike(2)
    of_ranks = ranks.run(jobs.train, 2, jobs.STACK, seeds, evaluates=False, timeout=300, **LAYOUTS[layout])
    for seed, *results in zip(seeds, *of_ranks, strict=True):
        for result in results:
            assert isinstance(result, Result), result
            assert_equal(result, jobs.train_alone(jobs.STACK, seed, 2), TOLERANCE["float64"])


def test_replicas_that_run_other_blocks_are_not_cut(ranks: RankPool) -> None:
    settings = {"dp": 2, "pp": 2, "segments": 1}
    for (text,) in ranks.run(jobs.train, 4, jobs.STACK, unlike(1), evaluates=False, timeout=300, **settings):
        assert text.startswith(
            "ConfigError: the first micro-batch of rank 2 (replica 1, stage 0) runs other modules than"
        )
        assert "tower.layers.0" in text and "Set pp=1 and segments=1" in text
