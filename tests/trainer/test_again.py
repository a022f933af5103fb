"""What a script does with a trainer that has trained already, or goes on from a checkpoint: as in the stock Trainer."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fold3d.errors import ConfigError
from tests.helpers.ranks import RankError, RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


class Fresh(Variant):
    """Trains once more with a new optimizer, of its own, or made by hand before."""

    def __init__(self, way: str) -> None:
        self.way = way

    def after(self, trainer: Any) -> Any:
        trainer.optimizer = trainer.lr_scheduler = None
        if self.way == "own":
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        elif self.way == "created":
            trainer.create_optimizer()
        trainer.train()


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(("way", "layout"), [("reset", {"dp": 2}), ("own", {"pp": 2}), ("created", {"pp": 2})])
def test_a_second_training_with_another_optimizer(
    ranks: RankPool, tmp_path: Path, way: str, layout: dict[str, int]
) -> None:
    job = Job(str(tmp_path / "ours"), variant=Fresh(way), arguments=SAVES)
    stock = run_stock(replace(job, folder=str(tmp_path / "stock")), replicas=layout.get("dp", 1))
    for outcome in ranks.run(run_fold3d, 2, job, layout):
        logs = [{k: v for k, v in entry.items() if k != "train_loss"} for entry in outcome.logs]
        its = [{k: v for k, v in entry.items() if k != "train_loss"} for entry in stock.logs]
        # Replicas evaluate other batches together.
        assert_same(replace(outcome, logs=logs), replace(stock, logs=its, metrics=outcome.metrics), 1e-10)


class Another(Variant):
    """Evaluates another model than the one that was trained, such as an average of its weights."""

    def after(self, trainer: Any) -> Any:
        trained = trainer.model
        trainer.model = copy.deepcopy(trained)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)
        try:
            return trainer.evaluate()["eval_loss"]
        finally:
            trainer.model = trained


@pytest.mark.parametrize("segments", [1, 2])
def test_another_model_is_evaluated(tmp_path: Path, segments: int) -> None:
    job = Job(str(tmp_path), variant=Another())
    wanted = run_stock(job)
    found = run_fold3d(job, {"segments": segments})
    assert found.extra == pytest.approx(wanted.extra, abs=1e-6) != found.metrics["eval_loss"]


class SetsRate(transformers.TrainerCallback):  # type: ignore[misc]
    """Sets the learning rate, and shrinks weights, before each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        for group in named["optimizer"].param_groups:
            group["lr"] = 0.01 / (1 + state.global_step)
        with torch.no_grad():
            for parameter in named["model"].parameters():
                parameter.mul_(0.99)


class WithRate(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [SetsRate()]}


def test_callbacks_before_the_first_step_find_what_was_loaded(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), variant=WithRate(), arguments=SAVES | {"lr_scheduler_type": "constant"})
    stock = run_stock(job)
    again = replace(job, folder=str(tmp_path / "again"), resume=str(tmp_path / "checkpoint-2"))
    resumed = ranks.run(run_fold3d, 1, again, {"segments": 2})[0]
    for name, value in resumed.weights.items():
        torch.testing.assert_close(value, stock.weights[name], rtol=0, atol=1e-10)


class AddsGroup(transformers.TrainerCallback):  # type: ignore[misc]
    """Trains the last block from the second step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 1:
            block = named["model"].transformer.h[-1]
            block.requires_grad_(True)
            named["optimizer"].add_param_group({"params": list(block.parameters()), "lr": 0.01, "weight_decay": 0.0})
            schedule = named["lr_scheduler"]
            schedule.base_lrs.append(0.01)
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])


class Unfreezes(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        named["model"].transformer.h[-1].requires_grad_(False)
        return named | {"callbacks": [AddsGroup()]}


def test_groups_that_come_later_are_saved_or_refused(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "ours"), variant=Unfreezes(), arguments=SAVES)
    stock = run_stock(replace(job, folder=str(tmp_path / "stock")))
    assert_same(ranks.run(run_fold3d, 1, job, {"segments": 2})[0], stock, 1e-10)
    ours, its = (torch.load(tmp_path / where / "checkpoint-4/optimizer.pt") for where in ("ours", "stock"))
    assert [len(group["params"]) for group in ours["param_groups"]] == [len(g["params"]) for g in its["param_groups"]]
    with pytest.raises(RankError, match=f"{ConfigError.__name__}.*other parameter groups since training began"):
        ranks.run(run_fold3d, 2, job, {"pp": 2})
