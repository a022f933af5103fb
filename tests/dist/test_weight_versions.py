"""PipeDream's weight_versions on several ranks are their recursions in one process; saved, evaluated and resumed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fold3d.engine.loss import loss_of
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_jobs import Result
from tests.dist.test_late_gradients import STEPS, TIMEOUT_S, fit, rate
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

STASHING = Case(
    gradient_delay=1, flush=False, weight_versions="stashing", pp=4, clip=False, tied=False, labels="ragged"
)
SYNCED = replace(STASHING, weight_versions="vertical_sync")


def train(case: Case, looks_every: int = 0) -> tuple[Result, list[str]]:
    """Trains on this rank; returns also which parameters it holds."""
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case, example=parity_jobs.replica_batch(case, 0, 0))
        result = Result()
        assert engine.optimizer is not None
        for step in range(STEPS):
            for group in engine.optimizer.param_groups:
                group["lr"] = rate(step)
            output = engine.step(parity_jobs.batch_of(engine, case, step))
            result.losses.append(output.loss.item())
            result.norms.append(output.grad_norm.item())
            if looks_every and step % looks_every == 0:
                engine.evaluate(parity_jobs.batch_of(engine, case, 0))
        engine.finish_updates()
        result.weights = engine.state_dict()["model"]
        held = list(engine.owned)
        engine.close()
    return result, held


def recursion(case: Case, stage_of: dict[str, int]) -> Result:
    """Returns what one process computes: gradients of weights of several ages, taken by the newest.

    Args:
        stage_of: of each parameter.
    """
    alone = replace(case.alone(), clip=False)
    with parity_jobs.precision(case):
        model = parity_jobs.build(alone)
        optimizer = parity_jobs.optimizer_of(model)(list(model.parameters()))
        history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
        result = Result()
        for step in range(STEPS):
            for name, parameter in model.named_parameters():
                versions = case.pp - stage_of[name] if case.weight_versions == "stashing" else case.pp
                parameter.data.copy_(history[max(step + 1 - versions, 0)][name])
            (batch,) = parity_jobs.micro_batches_of(alone, parity_jobs.global_batch(alone, step), 0)
            loss = loss_of(model(**batch))
            loss.backward()
            result.losses.append(loss.item())
            squares = sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None)
            result.norms.append(squares**0.5)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(history[-1][name])
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
            history.append({name: p.detach().clone() for name, p in model.named_parameters()})
    result.weights = history[-1]
    return result


@pytest.mark.parametrize(
    ("case", "family"),
    [(STASHING, "gpt2"), (SYNCED, "llama"), (STASHING, "llama"), (replace(SYNCED, recompute="blocks"), "gpt2")],
    ids=["stashing gpt2", "vertical_sync llama", "stashing llama", "vertical_sync gpt2 blocks"],
)
def test_twenty_micro_batches_are_the_recursion(ranks: RankPool, case: Case, family: str) -> None:
    case = replace(case, family=family)
    results = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)
    wanted = recursion(case, {name: stage for stage, (_, held) in enumerate(results) for name in held})
    for found, _ in results:
        assert found.losses == pytest.approx([0.0] * case.pp + wanted.losses[: -case.pp], abs=1e-12)
        assert found.norms == pytest.approx([0.0] * case.pp + wanted.norms[: -case.pp], rel=1e-12)
        for name, tensor in wanted.weights.items():
            torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=1e-12)
    looking = ranks.run(train, case.ranks, case, looks_every=3, timeout=TIMEOUT_S)[0][0]
    assert all(torch.equal(looking.weights[name], tensor) for name, tensor in results[0][0].weights.items())


@pytest.mark.parametrize("case", [STASHING, SYNCED], ids=["stashing", "vertical_sync"])
def test_checkpoints_of_the_trainer(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    """Saved and evaluated every three steps, and resumed: the same bits."""
    case = replace(case, pp=2, through="trainer", labels="full")
    often = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    run = functools.partial(ranks.run, fit, case.ranks, case, timeout=TIMEOUT_S)
    _, plain = run(str(tmp_path / "plain"))[0]
    _, saved = run(str(tmp_path / "saved"), **often)[0]
    folder = tmp_path / "saved" / "checkpoint-6"
    assert (folder / "late_gradients.safetensors").is_file()
    _, again = run(str(tmp_path / "again"), str(folder))[0]
    for name, tensor in plain.items():
        assert torch.equal(saved[name], tensor) and torch.equal(again[name], tensor)


def test_tied_weights_on_two_stages_are_refused(ranks: RankPool) -> None:
    with pytest.raises(Exception, match="tie_word_embeddings=False"):
        ranks.run(train, STASHING.pp, replace(STASHING, tied=True), timeout=TIMEOUT_S)
