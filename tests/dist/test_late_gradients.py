"""gradient_delay=1 on several ranks is the recursion W(t+1) = W(t) - update(g(W(t-1))) of one process, in any layout.

`LateAdamW` is that recursion. tests/parity has the pairs of settings; here are long trainings with a
schedule of rates, what stands between the steps, and checkpoints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fold3d
from fold3d.engine.loss import loss_of
from fold3d.errors import CheckpointError
from fold3d.trainer.arguments import TrainingArguments
from tests.dist import parity_jobs
from tests.dist.late_adamw import LateAdamW
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import assert_ranks_agree, assert_same_bits
from tests.dist.parity_jobs import MAX_NORM, Result
from tests.helpers.ranks import RankError, RankPool

pytestmark = pytest.mark.dist

STEPS, TIMEOUT_S = 20, 300.0
LATE = Case(m=2, gradient_delay=1, labels="ragged", layers=4)
FOLDED = replace(LATE, dp=2, pp=2, segments=2, schedule="aiao")
LAYOUTS = {
    "early": replace(FOLDED, dp_sync="early"),
    "zero1": replace(FOLDED, dp_sync="zero1"),
    "pipeline": replace(LATE, pp=4, m=4),
    "replicas": replace(LATE, dp=2, dp_sync="early"),
    "shards": replace(LATE, tp=2, pp=2, tp_overlap="sub", sequence_parallel=False, m=4),
}
FAMILIES = ("gpt2", "llama", "t5", "mixture")
"""GPT-2's embedding and head are one tensor, on two stages; not all experts of the mixture are used in a step."""
PAIRS = [
    (layout, family)
    for family in FAMILIES
    for layout in LAYOUTS
    if not (layout == "shards" and family == "t5")  # an encoder-decoder is not cut with tp
]


def rate(step: int) -> float:
    """Returns the learning rate of a step: up, then down."""
    return parity_jobs.LEARNING_RATE * math.sin(math.pi * (step + 1) / (STEPS + 1))


@functools.cache
def recursion(
    case: Case, steps: int = STEPS, kind: tuple[type[LateAdamW], Callable[[Any], None]] = (LateAdamW, LateAdamW.finish)
) -> Result:
    """Returns what one process computes of `case.alone()`; the norms of the steps' own gradients.

    Args:
        kind: of optimizer, and what it does at the end.
    """
    with parity_jobs.precision(case):
        model = parity_jobs.build(case)
        optimizer = parity_jobs.optimizer_of(model, kind[0])([p for p in model.parameters() if p.requires_grad])
        result = Result()
        for step in range(steps):
            whole = parity_jobs.global_batch(case, step)
            losses = []
            counts = _labels(whole) if case.family not in parity_jobs.IN_A_LOOP else None
            for one in parity_jobs.micro_batches_of(case.alone(), whole, 0):
                loss = (
                    loss_of(model(**one)) / case.total
                    if counts is None
                    else loss_of(model(**one, num_items_in_batch=counts))
                )
                loss.backward()
                losses.append(loss.item())
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
            result.losses.append(sum(losses))
            result.norms.append(norm.item())
        kind[1](optimizer)
        result.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return result


def _labels(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def train(
    case: Case, *, looks_every: int = 0, start: Any = None, steps: range = range(STEPS), ends: bool = True
) -> Result:
    """Trains on this rank.

    Args:
        looks_every: after so many steps an evaluation, and the state is gathered; 0: never.
        start: a state to begin with.
        ends: whether what waits is taken after the last step; its norm is then the last one.
    """
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case)
        result = Result()
        for step in steps:
            batch = parity_jobs.batch_of(engine, case, step)
            if start is not None:
                engine.evaluate(batch)
                engine.load_state_dict(start)
                start = None
            if engine.optimizer is None:
                engine.evaluate(batch)  # builds it
            assert engine.optimizer is not None
            for group in engine.optimizer.param_groups:
                group["lr"] = rate(step)
            output = engine.step(batch)
            result.losses.append(output.loss.item())
            result.norms.append(output.grad_norm.item())
            if looks_every and step % looks_every == 0:
                engine.evaluate(parity_jobs.batch_of(engine, case, 0))
                engine.state_dict()
        result.state = engine.state_dict()
        if ends:
            norm = engine.finish_updates()
            assert norm is not None
            result.norms.append(norm.item())
        result.digests.append(parity_jobs.digests(engine))
        result.weights = engine.state_dict()["model"]
        engine.close()
    return result


def assert_is(ours: Result, wanted: Result, *, weights: float = 1e-12, norms: float = 1e-13) -> None:
    """Weights absolute, norms relative."""
    assert ours.norms[0] == 0.0, "no gradient has come before the first step"
    for mine, theirs in zip(ours.norms[1:], wanted.norms, strict=True):
        assert mine == pytest.approx(theirs, rel=norms)
        assert theirs > MAX_NORM, "the case must clip"
    for name, tensor in ours.weights.items():
        torch.testing.assert_close(
            tensor, wanted.weights[name], rtol=0, atol=weights, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("layout", "family"), PAIRS)
def test_twenty_steps_are_the_recursion(ranks: RankPool, layout: str, family: str) -> None:
    case = replace(LAYOUTS[layout], family=family)
    results = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)
    assert_is(results[0], recursion(case.alone()))
    assert_ranks_agree(results, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_numbers_are_alike_in_both_ways(ranks: RankPool, dtype: str) -> None:
    runs = {}
    for way in ("early", "zero1"):
        case = replace(LAYOUTS[way], dtype=dtype)
        runs[way] = ranks.run(train, case.ranks, case, looks_every=3, timeout=TIMEOUT_S)
        assert_ranks_agree(runs[way], case)
    assert_same_bits(runs["early"][0], runs["zero1"][0])


@pytest.mark.parametrize("layout", ["early", "zero1", "pipeline", "shards"])
def test_evaluations_and_states_change_no_bit(ranks: RankPool, layout: str) -> None:
    case = LAYOUTS[layout]
    plain = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)[0]
    looking = ranks.run(train, case.ranks, case, looks_every=3, timeout=TIMEOUT_S)[0]
    assert looking.norms == plain.norms
    assert all(torch.equal(looking.weights[name], tensor) for name, tensor in plain.weights.items())


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", ["early", "zero1", "pipeline", "shards"])
def test_a_state_goes_on_bit_for_bit_and_in_any_layout(ranks: RankPool, layout: str) -> None:
    case = LAYOUTS[layout]
    whole = ranks.run(train, case.ranks, case, timeout=TIMEOUT_S)[0]
    half = ranks.run(train, case.ranks, case, steps=range(9), ends=False, timeout=TIMEOUT_S)[0]
    run = functools.partial(ranks.run, train, start=half.state, steps=range(9, STEPS), timeout=TIMEOUT_S)
    again = run(case.ranks, case)[0]
    assert half.norms + again.norms == whole.norms
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in whole.weights.items())
    one = replace(case.alone(), through="engine")
    moved = run(1, one)[0]
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(moved.weights[name], tensor, rtol=0, atol=1e-12)


def fit(
    case: Case, folder: str, resume: str | None = None, **arguments: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains by the Trainer; returns the norms it logs and the weights at the end."""
    with parity_jobs.precision(case):
        named = parity_jobs.trainer_arguments(case, folder) | {"gradient_accumulation_steps": case.m, "max_steps": 8}
        named |= {"lr_scheduler_type": "linear", "warmup_steps": 2} | parity_jobs.layout_of(case) | arguments
        trainer = fold3d.Trainer(
            model=parity_jobs.build(case),
            args=TrainingArguments(**named),
            train_dataset=parity_jobs.dataset(case, 8),
            eval_dataset=parity_jobs.dataset(case, 1),
            data_collator=parity_jobs.collate,
        )
        trainer.train(resume_from_checkpoint=resume)
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        weights = trainer.engine.state_dict()["model"]
        trainer.engine.close()
    return norms, weights


@pytest.mark.parametrize("way", ["early", "zero1"])
def test_checkpoints_of_the_trainer(ranks: RankPool, tmp_path: Path, way: str) -> None:
    """Saved and evaluated every three steps, and resumed: the same bits; in another layout to rounding."""
    case = replace(FOLDED, dp_sync=way, through="trainer", labels="full")
    often = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    run = functools.partial(ranks.run, timeout=TIMEOUT_S)
    norms, plain = run(fit, case.ranks, case, str(tmp_path / "plain"))[0]
    told, saved = run(fit, case.ranks, case, str(tmp_path / "saved"), **often)[0]
    assert told == norms
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())
    folder = tmp_path / "saved" / "checkpoint-6"
    assert (folder / "late_gradients.safetensors").is_file()
    told, again = run(fit, case.ranks, case, str(tmp_path / "again"), str(folder))[0]
    assert told == norms
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())
    one = replace(case.alone(), through="trainer")
    told, moved = run(fit, 1, one, str(tmp_path / "moved"), str(folder))[0]
    assert told == pytest.approx(norms, rel=1e-12)
    for name, tensor in plain.items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=1e-12)
    with pytest.raises(RankError, match=CheckpointError.__name__):
        run(fit, 1, replace(one, gradient_delay=0), str(tmp_path / "exact"), str(folder))


def test_the_best_model_is_what_was_evaluated(ranks: RankPool, tmp_path: Path) -> None:
    """What waits at the end belongs to other weights, and is dropped."""
    case = replace(LATE, dp=2, dp_sync="early", through="trainer")
    best = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best |= {"load_best_model_at_end": True, "learning_rate": 0.5, "save_total_limit": 1}
    _, weights = ranks.run(fit, case.ranks, case, str(tmp_path), timeout=TIMEOUT_S, **best)[0]
    (folder,) = tmp_path.glob("checkpoint-*")
    from safetensors.torch import load_file

    kept = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in kept.items() if name in weights)
