"""One small training job, run by the stock Trainer in this process or by fold3d's on the ranks of a pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import fold3d
from tests.helpers import device as test_device
from tests.helpers import models

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SPEED = ("runtime", "per_second", "preparation_time", "total_flos", "_ms", "_gb", "preemptions", "memory", "mfu")
"""Parts of log keys that measure time and memory, or what depends on the layout."""


class Variant:
    """What a user's script adds; subclasses at the top of a test module travel to the ranks."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of the Trainer."""
        return named

    def trainer(self, base: type[Any]) -> type[Any]:
        """Returns a subclass of the stock or fold3d Trainer."""
        return base

    def after(self, trainer: Any) -> Any:
        """Called after training; the result becomes `Outcome.extra`."""


@dataclass
class Job:
    """What to train; the layout is passed beside it. `arguments` go to TrainingArguments."""

    folder: str
    family: str = "gpt2"
    dtype: str = "float64"
    layers: int = 4
    dropout: float = 0.0
    tied: bool = True
    samples: int = 16
    arguments: dict[str, Any] = field(default_factory=dict)
    on_meta: bool = False
    metrics: bool = False
    resume: bool | str | None = None
    variant: Variant = field(default_factory=lambda: Variant())


@dataclass
class Outcome:
    """What a job produced; the same on every rank."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    extra: Any = None

    def column(self, key: str) -> list[float]:
        """Returns the values logged under `key`, in order."""
        return [entry[key] for entry in self.logs if key in entry]


def rows(count: int, *, seed: int = 3) -> list[dict[str, Tensor]]:
    """Returns samples of different lengths; the first labels of most are -100, one sample has no label at all."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = int(torch.randint(5, 12, (), generator=generator))
        ids = torch.randint(2, models.VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 4] = -100
        if number == 5:
            labels[:] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads to the longest sample of the micro-batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": pad(ids, batch_first=True, padding_value=1),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    """Returns the share of right next tokens, and sums that show which samples were seen."""
    labels, guesses = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
    seen = labels != -100
    found = {"accuracy": float((guesses == labels)[seen].mean()), "labels": float(seen.sum())}
    if prediction.inputs is not None:
        found["inputs"] = float((prediction.inputs * (prediction.inputs > 0)).sum())
    return found


def model_of(job: Job) -> torch.nn.Module:
    """Returns the job's model."""
    config = models.MODELS[job.family](layers=job.layers, dropout=job.dropout, tied=job.tied)
    device = "meta" if job.on_meta else "cpu"
    return models.build(config, dtype=DTYPES[job.dtype], device=device)


def stock_arguments(job: Job) -> dict[str, Any]:
    """Returns keyword arguments both kinds of TrainingArguments understand."""
    defaults = {
        "output_dir": job.folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 11,
    }
    return defaults | job.arguments


def trainer_arguments(job: Job) -> dict[str, Any]:
    """Returns keyword arguments of either Trainer."""
    named: dict[str, Any] = {
        "model": model_of(job),
        "train_dataset": rows(job.samples),
        "eval_dataset": rows(7, seed=4),
        "data_collator": collate,
    }
    if job.metrics:
        named["compute_metrics"] = accuracy
    return job.variant.arguments(named)


def run_stock(job: Job, *, replicas: int = 1) -> Outcome:
    """Trains with transformers.Trainer in this process; the micro-batches of `replicas` become one step's."""
    arguments = stock_arguments(job)
    arguments["gradient_accumulation_steps"] *= replicas
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = transformers.TrainingArguments(**arguments)
    trainer = job.variant.trainer(transformers.Trainer)(args=args, **trainer_arguments(job))
    trainer.train(resume_from_checkpoint=job.resume)
    extra = job.variant.after(trainer)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return Outcome(clean(trainer.state.log_history), weights, clean([trainer.evaluate()])[0], extra)


def run_fold3d(job: Job, layout: dict[str, Any]) -> Outcome:
    """Trains with fold3d.Trainer on the tests' device; called on every rank. The planner is asked only where `layout`
    says so."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with test_device.watched():
        arguments = stock_arguments(job) | {"use_cpu": test_device.chosen() == "cpu"}
        drawn = {"weights": "random"} if job.on_meta else {}
        args = fold3d.TrainingArguments(**arguments, **({"segments": 1} | drawn | layout))
        trainer = job.variant.trainer(fold3d.Trainer)(args=args, **trainer_arguments(job))
        trainer.train(resume_from_checkpoint=job.resume)
        extra = job.variant.after(trainer)
        logs = clean(trainer.state.log_history)
        metrics = clean([trainer.evaluate()])[0]
        weights = trainer.engine.state_dict()["model"]
        trainer.engine.close()
    return Outcome(logs, weights, metrics, extra)


def clean(logs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns the logs without what measures time."""
    return [{k: v for k, v in entry.items() if not any(part in k for part in SPEED)} for entry in logs]


def assert_same(ours: Outcome, stock: Outcome, tolerance: float) -> None:
    """Logs to single precision at best (the stock loop sums losses in float32), weights to `tolerance`."""
    assert len(ours.logs) == len(stock.logs)
    for mine, theirs in zip([*ours.logs, ours.metrics], [*stock.logs, stock.metrics], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert abs(mine[key] - value) <= max(tolerance, 2e-6) * max(1.0, abs(value)), (key, mine, theirs)
    shared = set(ours.weights) & set(stock.weights)  # state_dict() has tied weights under all of their names
    assert shared in (set(ours.weights), set(stock.weights)) and shared
    for name in shared:
        torch.testing.assert_close(ours.weights[name], stock.weights[name], rtol=0, atol=tolerance, msg=name)


def error_of(job: Job, layout: dict[str, Any], kind: type[fold3d.Fold3dError]) -> str:
    """Returns the text of the error of this kind with which fold3d's training ends."""
    try:
        run_fold3d(job, layout)
    except kind as error:
        return str(error)
    return "no error"
