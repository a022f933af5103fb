"""flush=False (PipeDream-2BW) on several ranks has the bits of gradient_delay=1, and is its recursion."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.parity_cases import Case
from tests.dist.parity_checks import assert_ranks_agree
from tests.dist.test_late_gradients import STEPS, TIMEOUT_S, assert_is, fit, recursion, train
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

FLOWING = Case(gradient_delay=1, flush=False, labels="ragged", layers=4, schedule="1f1b")
LAYOUTS = {
    "pipeline": replace(FLOWING, pp=4, m=4),
    "early": replace(FLOWING, dp=2, pp=2, m=3, dp_sync="early"),
    "zero1": replace(FLOWING, dp=2, pp=2, m=3, dp_sync="zero1"),
    "blocks": replace(FLOWING, pp=2, m=5, recompute="blocks"),
}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    ("layout", "family"),
    [("pipeline", "gpt2"), ("early", "llama"), ("zero1", "gpt2"), ("blocks", "llama"), ("pipeline", "llama")],
)
def test_twenty_steps_are_the_recursion(ranks: RankPool, layout: str, family: str) -> None:
    """GPT-2's embedding and head are one tensor, on the first and the last stage."""
    case = replace(LAYOUTS[layout], family=family)
    results = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)
    wanted = recursion(case.alone())
    assert_is(results[0], wanted)
    assert_ranks_agree(results, case)
    assert results[0].losses == pytest.approx([0.0, *wanted.losses[:-1]], abs=1e-12)
    late = ranks.run(train, case.ranks, replace(case, flush=True), timeout=TIMEOUT_S)[0]
    assert results[0].norms == late.norms
    assert all(torch.equal(results[0].weights[name], tensor) for name, tensor in late.weights.items())


@pytest.mark.parametrize("layout", ["pipeline", "early", "zero1"])
def test_evaluations_and_states_change_no_bit(ranks: RankPool, layout: str) -> None:
    case = LAYOUTS[layout]
    plain = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)[0]
    looking = ranks.run(train, case.ranks, case, looks_every=3, timeout=TIMEOUT_S)[0]
    assert looking.norms == plain.norms
    assert all(torch.equal(looking.weights[name], tensor) for name, tensor in plain.weights.items())


@pytest.mark.parametrize("layout", ["pipeline", "zero1"])
def test_a_state_goes_on_bit_for_bit_with_a_flush_or_without(ranks: RankPool, layout: str) -> None:
    case = LAYOUTS[layout]
    whole = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)[0]
    half = ranks.run(train, case.ranks, case, steps=range(9), ends=False, timeout=TIMEOUT_S)[0]
    run = functools.partial(ranks.run, train, case.ranks, start=half.state, steps=range(9, STEPS), timeout=TIMEOUT_S)
    for flush in (False, True):
        again = run(replace(case, flush=flush))[0]
        assert half.norms + again.norms == whole.norms
        assert all(torch.equal(again.weights[name], tensor) for name, tensor in whole.weights.items())


@pytest.mark.parametrize("way", ["early", "zero1"])
def test_checkpoints_of_the_trainer(ranks: RankPool, tmp_path: Path, way: str) -> None:
    """Saved and evaluated every three steps, and resumed: the same bits, which are those of gradient_delay=1."""
    case = replace(LAYOUTS[way], through="trainer", labels="full")
    often = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    run = functools.partial(ranks.run, fit, case.ranks, timeout=TIMEOUT_S)
    norms, plain = run(case, str(tmp_path / "plain"))[0]
    for found in (
        run(replace(case, flush=True), str(tmp_path / "late"))[0],
        run(case, str(tmp_path / "saved"), **often)[0],
        run(case, str(tmp_path / "again"), str(tmp_path / "saved" / "checkpoint-6"))[0],
    ):
        assert found[0] == norms
        assert all(torch.equal(found[1][name], tensor) for name, tensor in plain.items())
