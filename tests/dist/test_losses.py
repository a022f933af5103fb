"""Loss functions of users' kinds on every layout: the numbers of one process, or refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import losses_jobs
from tests.helpers.ranks import RankPool

SEEDS = 22
"""Losses for each layout."""
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"segments": 2, "schedule": "aiao"}),
    (1, {"segments": 1, "micro_batch_size": 2}),
    (1, {"segments": 2, "recompute": "full", "schedule": "aiao"}),
    (2, {"pp": 2, "segments": 1}),
    (2, {"pp": 2, "segments": 2, "schedule": "aiao"}),
    (2, {"pp": 2, "segments": 1, "micro_batch_size": 1}),
    (2, {"dp": 2, "segments": 1}),
    (2, {"dp": 2, "segments": 2, "schedule": "aiao"}),
    (2, {"tp": 2, "tp_overlap": "none", "segments": 1}),
    (2, {"tp": 2, "tp_overlap": "sub", "segments": 1}),
    (2, {"tp": 2, "tp_overlap": "sub", "segments": 2, "schedule": "aiao"}),
    (2, {"tp": 2, "tp_overlap": "none", "segments": 1, "micro_batch_size": 2}),
]


def name_of(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in layout.items())


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=[name_of(layout) for _, layout in LAYOUTS])
def test_equals_one_process_or_is_refused(ranks: RankPool, processes: int, layout: dict[str, Any]) -> None:
    seeds = list(range(SEEDS))
    refused, equal = 0, 0
    for outcomes in ranks.run(losses_jobs.train, processes, seeds, layout, timeout=400.0):
        for seed, found in zip(seeds, outcomes, strict=True):
            kind = losses_jobs.kind_of(seed)
            if isinstance(found, str):
                refused += 1
                why = ("micro_batch_size", "calls the model with other values")
                assert any(text in found for text in why), (kind, found)
                assert "micro_batch_size" in layout, (kind, found)
                continue
            equal += 1
            losses, weights = found
            expected, wanted = losses_jobs.alone(seed, layout.get("dp", 1))
            assert losses == pytest.approx(expected, rel=1e-10), kind
            for name, value in weights.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10, msg=f"{kind} {name}")
    assert equal > 0
    if "micro_batch_size" in layout:
        assert refused > 0, "some cannot be divided"
