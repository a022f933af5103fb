"""What depends on how batches are dealt out to replicas is as with the stock Trainer and DistributedDataParallel."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import (
    Job,
    Outcome,
    Variant,
    accuracy,
    assert_same,
    clean,
    collate,
    rows,
    run_fold3d,
    run_stock,
    stock_arguments,
    trainer_arguments,
)

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}


def run_ddp(job: Job) -> Outcome:
    """Trains with transformers.Trainer; called on every rank."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = transformers.TrainingArguments(**stock_arguments(job), ddp_backend="gloo")
    trainer = job.variant.trainer(transformers.Trainer)(args=args, **trainer_arguments(job))
    trainer.train()
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return Outcome(clean(trainer.state.log_history), weights, clean([trainer.evaluate()])[0])


class Weighted(Variant):
    """Samples with weights, which the model's forward does not take, in a loss divided by the global count."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        for name in ("train_dataset", "eval_dataset"):
            named[name] = [{**row, "weight": torch.tensor(float(i % 3 + 1))} for i, row in enumerate(named[name])]
        return named | {"data_collator": collate_weighted}

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **_: Any
            ) -> Any:
                weight = inputs.pop("weight")
                outputs = model(**inputs)
                logits, labels = outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:]
                each = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
                loss = (each.sum(1) * weight).sum() / num_items_in_batch
                return (loss, outputs) if return_outputs else loss

        return Trainer


def collate_weighted(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return collate(samples) | {"weight": torch.stack([sample["weight"] for sample in samples])}


class Guesses(Variant):
    """Metrics of what preprocess_logits_for_metrics leaves, on several data sets."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
            "compute_metrics": lambda found: {"sum": float((found.predictions * (found.label_ids > 0)).sum())},
            "eval_dataset": {"odd": rows(7, seed=4), "even": rows(8, seed=5)},
        }


class Lists(Variant):
    """Metrics of batches that are not put together."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"compute_metrics": lambda found: {"batches": float(len(found.predictions))}}


class Equal(IterableDataset[dict[str, Tensor]]):
    """Samples of one length, without a number: neither training nor evaluation divides them evenly."""

    def __init__(self, count: int) -> None:
        ids = torch.randint(2, models.VOCABULARY, (count, 7), generator=torch.Generator().manual_seed(count))
        self.rows = [{"input_ids": row, "labels": row} for row in ids]

    def __iter__(self) -> Any:
        return iter(self.rows)


class Streams(Variant):
    """A pass ends with one sample for two replicas, and an evaluation with three."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"train_dataset": Equal(13), "eval_dataset": Equal(7), "compute_metrics": accuracy}


class Files(Variant):
    """Streams from several files, which processes could read apart: they hold different numbers of samples."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        lists = [{name: value.tolist() for name, value in row.items()} for row in Equal(13).rows]
        stream = Dataset.from_list(lists).to_iterable_dataset(num_shards=4)
        data = {"train_dataset": stream.shuffle(seed=1, buffer_size=4), "eval_dataset": stream}
        return named | data | {"data_collator": transformers.default_data_collator, "compute_metrics": accuracy}


CASES: dict[str, tuple[Variant, dict[str, Any]]] = {
    "weighted": (Weighted(), {"remove_unused_columns": False}),
    "guesses": (Guesses(), EVALUATES | {"eval_accumulation_steps": 1}),
    "lists": (Lists(), EVALUATES | {"eval_do_concat_batches": False}),
    "streams": (Streams(), EVALUATES | {"max_steps": 6}),
    "files": (Files(), EVALUATES | {"max_steps": 6}),
}


@pytest.mark.parametrize("name", CASES)
def test_same(ranks: RankPool, tmp_path: Path, name: str) -> None:
    variant, arguments = CASES[name]
    job = Job(str(tmp_path / "stock"), variant=variant, arguments={"max_steps": 3} | arguments)
    stock = ranks.run(run_ddp, 2, job)[0]
    for processes, layout in ((2, {"dp": 2}), (4, {"dp": 2, "pp": 2})):
        ours = ranks.run(run_fold3d, processes, replace(job, folder=str(tmp_path / "ours")), layout)
        assert_same(ours[0], stock, 1e-10)


def test_a_stream_is_taken_up_where_training_stopped(ranks: RankPool, tmp_path: Path) -> None:
    saved = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    job = Job(str(tmp_path), variant=Streams(), arguments=saved)
    whole = ranks.run(run_fold3d, 4, job, {"dp": 2, "pp": 2})[0]
    resumed = ranks.run(run_fold3d, 4, replace(job, resume=str(tmp_path / "checkpoint-2")), {"dp": 2, "pp": 2})[0]
    steps = [
        replace(
            outcome, logs=[entry for entry in outcome.logs if "train_loss" not in entry]
        )  # a mean over one's own steps
        for outcome in (resumed, whole)
    ]
    assert_same(*steps, 1e-10)


class Ragged(Variant):
    """Batches that are padded to different lengths, which nothing could put together."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        class Stream(IterableDataset[dict[str, Tensor]]):
            def __iter__(self) -> Any:
                return iter(rows(7, seed=4))

        return named | {"eval_dataset": Stream(), "compute_metrics": accuracy}


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_metrics_of_a_stream_count_each_sample_once(ranks: RankPool, tmp_path: Path, layout: dict[str, int]) -> None:
    """One process evaluates two samples at once, as two replicas do together."""
    steps = {"max_steps": 1, "include_for_metrics": ["inputs"]}
    job = Job(str(tmp_path), variant=Ragged(), arguments=steps | {"per_device_eval_batch_size": 2})
    ours = ranks.run(run_fold3d, 2, job, layout)[0].metrics
    stock = run_stock(job, replicas=layout.get("dp", 1)).metrics
    assert {name: ours[name] for name in ("eval_labels", "eval_inputs")} == {
        name: stock[name] for name in ("eval_labels", "eval_inputs")
    }
    assert ours["eval_accuracy"] == pytest.approx(stock["eval_accuracy"], abs=1e-12)
