"""Gradients between the backward pass and the optimizer are there, and what is made of them counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer import gradient_jobs as jobs
from tests.trainer.jobs import Job, assert_same, collate, error_of, model_of, rows, run_fold3d, run_stock

ARGUMENTS = {"max_steps": 4, "max_grad_norm": 0.02, "learning_rate": 1e-3}
LAYOUTS = [
    {"dp": 2, "dp_sync": "early"},
    {"dp": 2, "dp_sync": "zero1", "bucket_bytes": 1},
    {"dp": 2, "dp_sync": "serial"},
    {"dp": 2, "pp": 2, "segments": 2, "dp_sync": "early", "bucket_bytes": 1},
    {"dp": 2, "pp": 2, "dp_sync": "zero1"},
    {"pp": 2, "segments": 2},
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_whatever_is_made_of_gradients_counts(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Values clipped before the norm; noise, zeros, other tensors and none after it: the stock Trainer's weights."""
    dp, pp = layout.get("dp", 1), layout.get("pp", 1)
    job = Job(str(tmp_path), arguments=ARGUMENTS, variant=jobs.Changed())
    found = ranks.run(run_fold3d, dp * pp, job, layout)
    stock = run_stock(job, replicas=dp)
    assert min(stock.column("grad_norm")) > ARGUMENTS["max_grad_norm"], "the norm is clipped, too"
    for rank, outcome in enumerate(found):
        outcome.metrics = stock.metrics  # which depend on the number of samples that are evaluated together
        assert_same(outcome, stock, 1e-12)
        for mine, theirs in zip(outcome.extra, stock.extra, strict=True):
            for ours, whole in zip(mine, theirs, strict=True):
                assert ours and set(ours) <= set(whole), rank
                assert all(abs(ours[name] - whole[name]) < 1e-12 for name in ours)
    names = set().union(*(step for outcome in found for step in outcome.extra[0]))
    assert names == set(stock.extra[0][0])


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("where", ["callback", "method"])
@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"tp": 2}, {"dp": 2, "dp_sync": "zero1"}, {"pp": 2}], ids=str)
def test_clipping_by_the_accelerator(ranks: RankPool, tmp_path: Path, layout: dict[str, Any], where: str) -> None:
    """Each stage scaled its gradients by a norm of its own."""
    dp = layout.get("dp", 1)
    job = Job(str(tmp_path), arguments=ARGUMENTS | {"max_grad_norm": 0.05, "optim": "sgd"}, variant=jobs.Clips(where))
    stock = run_stock(job, replicas=dp)
    for outcome in ranks.run(run_fold3d, dp * layout.get("pp", 1) * layout.get("tp", 1), job, layout):
        outcome.metrics = stock.metrics
        assert_same(outcome, stock, 1e-11)
        # transformers' loss is computed in fp32, and a divided vocabulary is summed in another order.
        rel = 1e-7 if "tp" in layout else 1e-9
        assert outcome.extra == pytest.approx(stock.extra, rel=rel) and len(stock.extra) == 4


def test_clipping_some_parameters_by_the_accelerator(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), arguments=ARGUMENTS, variant=jobs.Clips("callback", some=True))
    for text in ranks.run(error_of, 2, job, {"pp": 2}, ConfigError):
        assert "clip_grad_norm_(norm_type=2) of 3 parameters" in text and "max_grad_norm" in text


@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"pp": 2}], ids=str)
def test_copies_of_tied_weights_stay_equal(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Also where their stages draw other noise."""
    job = Job(str(tmp_path), arguments=ARGUMENTS, variant=jobs.Sequential())
    found = ranks.run(run_fold3d, layout.get("dp", 1) * 2, job, layout)
    assert all(outcome.extra.equal(found[0].extra) for outcome in found[:2])


def test_a_callback_that_says_it_reads_none_and_does(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), arguments=ARGUMENTS, variant=jobs.Denied())
    for text in ranks.run(error_of, 2, job, {"dp": 2, "dp_sync": "early"}, ConfigError):
        assert ".grad was read or changed" in text and "on_pre_optimizer_step" in text, text


def test_a_reader_of_one_process_is_one_for_all(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), arguments=ARGUMENTS, variant=jobs.Counts())
    for outcome in ranks.run(run_fold3d, 2, job, {"dp": 2, "dp_sync": "early"}):
        assert outcome.extra == [True] * 4


@pytest.mark.parametrize("dp_sync", ["early", "zero1", "serial"])
def test_a_loop_of_one_s_own(ranks: RankPool, dp_sync: str) -> None:
    """Asked for, gradients are whole; not asked for, they cannot be taken for something else."""
    expected = jobs.stock_loop()
    for _, weights in ranks.run(jobs.own_loop, 2, dp_sync, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-14)
    for errors, _ in ranks.run(jobs.own_loop, 2, dp_sync, False):
        for number, text in enumerate(errors):
            assert "reads_gradients=True" in text, errors
            assert ("has taken" in text) == (number % 5 == 4)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}, {"dp": 2, "pp": 2, "segments": 2}], ids=str)
def test_a_step_by_hand_before_any_training(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Nobody has made an optimizer yet; loss and gradients are the stock model's."""
    job = Job(str(tmp_path), arguments={"gradient_accumulation_steps": 1})
    model, batch = model_of(job), collate(rows(2))
    loss = model(**batch).loss
    loss.backward()
    for ours, gradients in ranks.run(jobs.step_by_hand, layout.get("dp", 1) * layout.get("pp", 1), job, layout):
        assert ours == pytest.approx(loss.item(), rel=1e-12)
        assert gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
