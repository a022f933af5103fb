"""A fresh model for every training: model_init, and hyperparameter_search over it, against the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import transformers

import fold3d
from fold3d.errors import ConfigError
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import (
    Job,
    Outcome,
    Variant,
    assert_same,
    run_fold3d,
    run_stock,
    stock_arguments,
    trainer_arguments,
)

LAYOUTS = [
    (2, {"pp": 2, "segments": 2}),
    (2, {"dp": 2, "dp_sync": "zero1"}),
    pytest.param(2, {"tp": 2}),
]
TRIALS = 5
PRUNED, LAST = 1, 3


class Fresh(Variant):
    """The model is made by `model_init`, from the random numbers of the moment; trains a second time."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        del named["model"]
        return named | {"model_init": self.make}

    def make(self, trial: Any = None) -> torch.nn.Module:
        """Returns a model of as many layers as the trial says."""
        layers = 4 if trial is None else trial.suggest_int("layers", 4, 5)
        config = models.MODELS["gpt2"](layers=layers, dropout=0.0, tied=True)
        return transformers.AutoModelForCausalLM.from_config(config).double()

    def after(self, trainer: Any) -> Any:
        logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.train()
        assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(logs)
        return None


@pytest.mark.parametrize("processes, layout", LAYOUTS)
def test_trains_a_fresh_model_every_time(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any]
) -> None:
    job = Job(str(tmp_path), variant=Fresh(), samples=32)
    stock = run_stock(job, replicas=layout.get("dp", 1))
    outcomes: list[Outcome] = ranks.run(run_fold3d, processes, job, layout)
    for ours in outcomes:
        stock.metrics = ours.metrics if layout.get("dp") else stock.metrics
        # transformers' loss is in float32: shards of a vocabulary are summed in another order
        assert_same(ours, stock, 1e-6 if layout.get("tp") else 1e-10)


class Pruner(optuna.pruners.BasePruner):
    """Prunes one trial."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.number == PRUNED)


def space(trial: Any) -> dict[str, Any]:
    """Returns what a trial changes; the last one ends the study."""
    if trial.number == LAST and hasattr(trial, "study"):
        trial.study.stop()
    trial.suggest_int("layers", 4, 5)  # for model_init: other processes get what was suggested here
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2, log=True),
        "gradient_accumulation_steps": trial.suggest_categorical("gradient_accumulation_steps", [2, 4]),
    }


def search(job: Job, layout: dict[str, Any] | None) -> tuple[Any, list[float]]:
    """Returns the best run, where the study is, and the objective after every evaluation."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objectives: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        objectives.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    named = stock_arguments(job)
    args: Any = transformers.TrainingArguments(**named)
    if layout is not None:
        args = fold3d.TrainingArguments(**named, **({"segments": 1} | layout))
    kind: Any = transformers.Trainer if layout is None else fold3d.Trainer
    trainer = kind(args=args, **trainer_arguments(job))
    best = trainer.hyperparameter_search(
        space,
        objective,
        n_trials=TRIALS,
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=Pruner(),
    )
    if layout is not None:
        trainer.engine.close()
    return best, objectives


@pytest.mark.parametrize("processes, layout", [(1, {"segments": 2}), (2, {"pp": 2, "segments": 2})])
def test_searches(ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any]) -> None:
    """One trial is pruned, and the study ends before all trials: the other processes hear of both."""
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    job = Job(str(tmp_path), variant=Fresh(), samples=32, arguments=arguments)
    best, objectives = search(job, None)
    found = ranks.run(search, processes, job, layout, timeout=200)
    assert len(objectives) == 2 * (LAST + 1) - 1
    for number, (run, seen) in enumerate(found):
        assert seen == pytest.approx(objectives, rel=1e-6)
        assert (run is None) == (number > 0)
    assert found[0][0].run_id == best.run_id and found[0][0].hyperparameters == best.hyperparameters
    assert {path.name for path in tmp_path.iterdir()} >= {"run-0", f"run-{LAST}"}


def test_refused(ranks: RankPool, tmp_path: Path) -> None:
    assert all(ranks.run(refused, 2, Job(str(tmp_path), variant=Fresh())))


def refused(job: Job) -> bool:
    """Whether what processes cannot do together is refused."""
    args = fold3d.TrainingArguments(**stock_arguments(job), pp=2, segments=1)
    trainer = fold3d.Trainer(args=args, **trainer_arguments(job))
    for name, value in (("n_jobs", 2), ("catch", (ValueError,))):
        with pytest.raises(ConfigError, match=f"{name}=.*all processes run a trial together"):
            trainer.hyperparameter_search(**{name: value})
    trainer.engine.close()
    return True
