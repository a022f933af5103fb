"""What differs between processes without anybody's meaning it: metrics that are drawn at random, and lengths of data
sets. Who decides by the first decides alike, and the second is said before anybody waits for a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset

import fold3d
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, rows, stock_arguments, trainer_arguments


def trainer_of(folder: str, *, named: dict[str, Any] | None = None, **arguments: Any) -> fold3d.Trainer:
    job = Job(folder, arguments={"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1} | arguments)
    args = fold3d.TrainingArguments(**stock_arguments(job), dp=2, segments=1)
    return fold3d.Trainer(args=args, **(trainer_arguments(job) | (named or {})))


def with_metrics_of_its_own(folder: str) -> tuple[Any, list[float], list[float]]:
    """Returns the best checkpoint, learning rates, and metrics."""
    seen: list[float] = []

    def metrics(_: Any) -> dict[str, float]:  # on process 0 it falls, on process 1 it rises
        seen.append(0.0)
        rank = dist.get_rank()
        return {"quality": len(seen) * (1 if rank else -1) + 0.1 * rank}

    settings = {"factor": 0.5, "patience": 0, "mode": "max"}
    trainer = trainer_of(
        folder,
        named={"compute_metrics": metrics},
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="quality",
        greater_is_better=True,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs=settings,
    )
    trainer.train()
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    told = [entry["eval_quality"] for entry in trainer.state.log_history if "eval_quality" in entry]
    found = trainer.state.best_model_checkpoint, rates, [*told, trainer.evaluate()["eval_runtime"]]
    trainer.engine.close()
    return found


@pytest.mark.gate
def test_metrics_are_those_of_the_first_process(ranks: RankPool, tmp_path: Any) -> None:
    first, second = ranks.run(with_metrics_of_its_own, 2, str(tmp_path))
    assert first == second and first[0].endswith("checkpoint-1") and first[2][:3] == [-1.0, -2.0, -3.0]


def of_other_lengths(folder: str) -> list[str]:
    """Returns what is said of data sets that are shorter on process 1."""
    found = []
    for name in ("train_dataset", "eval_dataset"):
        trainer = trainer_of(folder)
        data = getattr(trainer, name)
        setattr(trainer, name, [data[k] for k in range(len(data) // (1 + dist.get_rank()))])
        try:
            trainer.train() if name == "train_dataset" else trainer.evaluate()
        except ConfigError as error:
            found.append(str(error))
        trainer.engine.close()
    return found


@pytest.mark.gate
def test_lengths_of_data_sets_are_compared(ranks: RankPool, tmp_path: Any) -> None:
    for train, evaluation in ranks.run(of_other_lengths, 2, str(tmp_path)):
        assert "the number of batches of the training" in train and "rank 1" in train, train
        assert "the number of batches of the evaluation" in evaluation and "rank 1" in evaluation, evaluation


class Stream(IterableDataset[Any]):
    """Of as many samples as there are left after a division by hand."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(16 - 4 * dist.get_rank()))


def of_a_stream(folder: str) -> str:
    trainer = trainer_of(folder, named={"train_dataset": Stream()}, max_steps=20, eval_strategy="no")
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    finally:
        trainer.engine.close()
    return "no error"


@pytest.mark.gate
def test_a_stream_that_ends_on_one_process(ranks: RankPool, tmp_path: Any) -> None:
    for said in ranks.run(of_a_stream, 2, str(tmp_path), timeout=60):
        assert "a stream must be as long on all" in said, said
