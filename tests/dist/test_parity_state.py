"""Evaluation with another batch size, and training that continues under another layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.dist import parity_extra, parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_equal
from tests.helpers.ranks import RankPool

EVALUATED = [
    Case(m=2),
    Case(dp=2, pp=2, segments=2, m=2, schedule="aiao"),
    Case(pp=4, m=3, family="opt", dtype="float32"),
    Case(dp=3, m=2, family="llama", tied=False),
    Case(dp=2, segments=2, m=2, schedule="interleaved", clip=False, recompute=True, labels="ragged"),
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("case", EVALUATED, ids=lambda case: case.name)
def test_evaluation(ranks: RankPool, case: Case) -> None:
    """Three rows per replica, longer than those of training, equal `Trainer.evaluate` on all rows at once."""
    found = ranks.run(parity_extra.evaluate, case.ranks, case, timeout=150.0)
    assert all(losses == found[0] for losses in found)
    expected = parity_extra.evaluate_alone(case)
    assert len(expected) == 3 and len(set(expected)) == 3
    assert max(abs(a - b) for a, b in zip(found[0], expected, strict=True)) <= TOLERANCE[case.dtype]


def test_evaluation_ignores_dropout(ranks: RankPool) -> None:
    case = Case(pp=2, m=2)
    plain = ranks.run(parity_extra.evaluate, 2, case)[0]
    dropped = ranks.run(parity_extra.evaluate, 2, replace(case, dropout=0.3))[0]
    assert abs(plain[0] - dropped[0]) <= 1e-12 and plain[1] != dropped[1]


CHAINS = [
    (Case(dropout=0.1, dtype="float64"), "the tied weight lies on one stage, then on two, then on one"),
    (Case(dropout=0.1, family="llama", tied=False, dtype="float32"), "float32"),
    (Case(dropout=0.1, family="plain", tied=True), "no transformers model"),
]
LAYOUTS = [
    {"dp": 2, "pp": 2, "segments": 2, "m": 2, "schedule": "aiao", "dp_sync": "zero1"},
    {"dp": 1, "pp": 4, "segments": 1, "m": 4, "dp_sync": "auto"},
    {"dp": 4, "pp": 1, "segments": 1, "m": 1, "dp_sync": "zero1"},
    {"dp": 2, "pp": 1, "segments": 2, "m": 2, "schedule": "aiao", "dp_sync": "early"},
    {"dp": 1, "pp": 2, "segments": 2, "m": 4, "schedule": "interleaved", "recompute": True},
]


SHARDED_CHAINS = [
    (Case(family="gpt2-4", dtype="float64"), "a tied vocabulary in parts"),
    (Case(family="llama", tied=False, dtype="float32"), "float32, key heads that two shards hold"),
    (Case(family="plain", tied=True, dropout=0.1), "no transformers model"),
]
SHARDED_LAYOUTS = [
    {"dp": 2, "tp": 2, "pp": 1, "segments": 1, "m": 2, "dp_sync": "zero1"},
    {"dp": 1, "pp": 2, "segments": 1, "m": 4},
    {"dp": 1, "tp": 4, "pp": 1, "segments": 1, "m": 4},
    {"dp": 1, "tp": 2, "pp": 2, "segments": 1, "m": 4},
    {"dp": 2, "tp": 2, "pp": 1, "segments": 2, "m": 2, "schedule": "aiao", "dp_sync": "early"},
]
MOVES = [(*chain, LAYOUTS) for chain in CHAINS] + [(*chain, SHARDED_LAYOUTS) for chain in SHARDED_CHAINS]


@pytest.mark.parametrize(
    "base, why, layouts", MOVES, ids=[f"{one[0].family}{'-tp' * (one[2] is SHARDED_LAYOUTS)}" for one in MOVES]
)
def test_state_moves_across_layouts(ranks: RankPool, base: Case, why: str, layouts: list[dict[str, Any]]) -> None:
    """One step in each layout, handing the state on, is the same training as all steps in one process."""
    expected = ranks.run(parity_jobs.train, 1, replace(base, m=4), steps=range(len(layouts)), timeout=150.0)[0]
    tolerance, state = TOLERANCE[base.dtype], None
    for step, layout in enumerate(layouts):
        case = replace(base, **layout)
        results = ranks.run(parity_jobs.train, case.ranks, case, start=state, steps=[step], timeout=150.0)
        state = results[0].state
        assert state["step_index"] == step + 1
        assert abs(results[0].losses[0] - expected.losses[step]) <= tolerance, (why, step)
        assert abs(results[0].norms[0] - expected.norms[step]) <= tolerance * expected.norms[step], (why, step)
    assert_equal(
        parity_jobs.Result(losses=[0.0], norms=[0.0], weights=state["model"]),
        parity_jobs.Result(losses=[0.0], norms=[0.0], weights=expected.weights),
        tolerance,
    )
    moments, wanted = state["optimizer"], expected.state["optimizer"]
    assert moments.keys() == wanted.keys() and moments
    for name in wanted:
        for key, value in wanted[name].items():
            torch.testing.assert_close(moments[name][key], value, rtol=0, atol=tolerance, msg=f"{name} {key}")
