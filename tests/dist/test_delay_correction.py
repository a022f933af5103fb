"""delay_correction on several ranks is its recursion in one process, in any layout; without a flush, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.late_adamw import LateAdamW
from tests.dist.parity_checks import assert_ranks_agree
from tests.dist.test_late_gradients import LATE, STEPS, TIMEOUT_S, assert_is, fit, recursion, train
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

FED_BACK = replace(LATE, delay_correction="error_feedback", dp=2, pp=2, m=3)
PREDICTED = replace(FED_BACK, delay_correction="predict")
CASES = {
    "fed back, zero1": replace(FED_BACK, dp_sync="zero1"),
    "fed back, folded": replace(FED_BACK, segments=2, schedule="aiao", dp_sync="early"),
    "fed back, without a flush": replace(FED_BACK, flush=False, dp_sync="zero1"),
    "predicted, zero1": replace(PREDICTED, dp_sync="zero1"),
    "predicted, folded": replace(PREDICTED, segments=2, schedule="aiao", dp_sync="early"),
    "predicted, shards": replace(PREDICTED, dp=1, tp=2, tp_overlap="sub", sequence_parallel=False),
}


class FeedsBack(LateAdamW):
    """Takes 2 u(t) - u(t-1)."""

    _updates: dict[Tensor, Tensor] | None = None

    @torch.no_grad()
    def finish(self) -> None:
        """Takes what the last call has kept."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        is_first = self._kept is None
        super().finish()
        if is_first:
            return
        last, self._updates = self._updates or {}, {}
        for p, old in zip(parameters, before, strict=True):
            self._updates[p] = old - p
            p.sub_(self._updates[p] - last.get(p, torch.zeros_like(p)))


class Predicts(LateAdamW):
    """Leaves the weights for the next gradients in the parameters; `finish` leaves those that it has come to."""

    _weights: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keeps the gradients that there are now, of predicted weights."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = self._weights or [p.detach().clone() for p in parameters]
        for p, weight in zip(parameters, before, strict=True):
            p.copy_(weight)
        super().step()
        self._weights = [p.detach().clone() for p in parameters]
        for p, now, old in zip(parameters, self._weights, before, strict=True):
            p.copy_(2 * now - old)

    @torch.no_grad()
    def end(self) -> None:
        """Takes what the last call has kept."""
        assert self._weights is not None
        for p, weight in zip((p for group in self.param_groups for p in group["params"]), self._weights, strict=True):
            p.copy_(weight)
        self.finish()


KINDS: dict[str, tuple[type[LateAdamW], Callable[[Any], None]]] = {
    "error_feedback": (FeedsBack, FeedsBack.finish),
    "predict": (Predicts, Predicts.end),
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_the_recursion(ranks: RankPool, name: str, family: str) -> None:
    case = replace(CASES[name], family=family)
    results = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)
    wanted = recursion(case.alone(), kind=KINDS[case.delay_correction])
    assert_is(results[0], wanted)
    assert_ranks_agree(results, case)
    plain = recursion(replace(case.alone(), delay_correction="none"))
    assert max((wanted.weights[k] - plain.weights[k]).abs().max().item() for k in plain.weights) > 1e-4


@pytest.mark.parametrize("name", ["fed back, zero1", "predicted, zero1", "predicted, shards"])
def test_evaluations_and_states_change_no_bit_and_a_state_goes_on(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    whole = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)[0]
    looking = ranks.run(train, case.ranks, case, looks_every=3, timeout=TIMEOUT_S)[0]
    half = ranks.run(train, case.ranks, case, steps=range(9), ends=False, timeout=TIMEOUT_S)[0]
    run = functools.partial(ranks.run, train, start=half.state, steps=range(9, STEPS), timeout=TIMEOUT_S)
    again = run(case.ranks, case)[0]
    assert looking.norms == half.norms + again.norms == whole.norms
    moved = run(1, replace(case.alone(), through="engine"))[0]
    for key, tensor in whole.weights.items():
        assert torch.equal(looking.weights[key], tensor) and torch.equal(again.weights[key], tensor)
        torch.testing.assert_close(moved.weights[key], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("correction", ["error_feedback", "predict"])
def test_checkpoints_of_the_trainer(ranks: RankPool, tmp_path: Path, correction: str) -> None:
    """Saved and evaluated every three steps, and resumed: the same bits."""
    case = replace(LATE, dp=2, dp_sync="zero1", delay_correction=correction, through="trainer", labels="full")
    often = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    run = functools.partial(ranks.run, fit, case.ranks, case, timeout=TIMEOUT_S)
    norms, plain = run(str(tmp_path / "plain"))[0]
    for found in (
        run(str(tmp_path / "saved"), **often)[0],
        run(str(tmp_path / "again"), str(tmp_path / "saved" / "checkpoint-6"))[0],
    ):
        assert found[0] == norms
        assert all(torch.equal(found[1][name], tensor) for name, tensor in plain.items())
