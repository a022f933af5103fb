"""What the ranks run to show that what a user's code asks, counts and reads is what the stock Trainer would give."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers

import fold3d
from fold3d import config
from tests.trainer.jobs import Job, Outcome, Variant, run_fold3d, stock_arguments, trainer_arguments
from tests.trainer.sync_jobs import Warnings, weights_of


def build(job: Job, layout: dict[str, Any], kind: type[Any] = fold3d.Trainer, loss: Any = None) -> Any:
    """Returns a Trainer of this kind on this rank."""
    args = fold3d.TrainingArguments(**stock_arguments(job), **({"segments": 1} | layout))
    return kind(args=args, **trainer_arguments(job), compute_loss_func=loss)


def exchanges(job: Job, layout: dict[str, Any]) -> dict[str, Any]:
    """Returns what the accelerator's collectives make of numbers that differ by replica."""
    trainer = build(job, layout)
    accelerator, own = trainer.accelerator, trainer.accelerator.process_index
    mine = torch.tensor([own + 1.0, 10.0 * own])
    found = {
        "sum": accelerator.reduce(mine, "sum"),
        "default": accelerator.reduce({"a": [mine]})["a"][0],
        "mean": accelerator.reduce(mine, "mean"),
        "max": accelerator.reduce(mine, "max"),
        "none": accelerator.reduce(mine, "none") - mine,
        "gathered": accelerator.gather(mine),
        "of metrics": accelerator.gather_for_metrics(mine),
        "objects": accelerator.gather_for_metrics([f"replica {own}"], use_gather_object=True),
        "padded": accelerator.gather(accelerator.pad_across_processes(torch.ones(1, own + 1), dim=-1, pad_index=-1)),
        "padded first": accelerator.gather(accelerator.pad_across_processes(torch.ones(own + 1), pad_first=True)),
    }
    accelerator.wait_for_everyone()
    if trainer.args.process_index == trainer.args.world_size - 1:
        accelerator.set_trigger()
    found["triggered"] = [accelerator.check_trigger(), accelerator.check_trigger()]
    trainer.engine.close()
    return found


class Pushes(transformers.TrainerCallback):  # type: ignore[misc]
    """Reads weights before a push."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.trainer: Any = None

    def on_push_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(weights_of(self.trainer))


class Pushing(transformers.TrainerCallback):  # type: ignore[misc]
    """Reads nothing, and has the trainer's event of a push come right after a step."""

    reads_gradients = False

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.trainer.callback_handler.on_push_begin(args, state, control)


class Reading(fold3d.Trainer):
    """Reads weights where it logs, and in a hook behind the optimizer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.seen: list[int] = []
        self.hooked: list[int] = []
        super().__init__(*args, **named)

    def create_optimizer(self, *args: Any) -> Any:
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args)
        if made:
            optimizer.register_step_post_hook(lambda *_: self.hooked.append(weights_of(self)))
        return optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.seen.append(weights_of(self))
        super().log(logs, start_time)


def reads(job: Job, layout: dict[str, Any]) -> dict[str, Any]:
    """Returns what was read on a push, in `log` and in a hook behind the optimizer, and what the user is shown."""
    trainer = build(job, layout, Reading)
    pushes, pushing = Pushes(), Pushing()
    for callback in (pushes, pushing):
        callback.trainer = trainer
        trainer.add_callback(callback)
    listed = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    texts = messages("transformers.trainer", trainer.train)
    found = {"push": pushes.seen, "log": trainer.seen, "hook": trainer.hooked, "listed": listed}
    found["parameters"] = [text for text in texts if "trainable parameters" in text]
    trainer.engine.close()
    return found


def messages(logger: str, call: Callable[[], Any]) -> list[str]:
    """Returns what `logger` tells, information included, while `call` runs."""
    told, keeper = logging.getLogger(logger), Warnings()
    level = told.level
    keeper.setLevel(logging.INFO)
    told.addHandler(keeper)
    told.setLevel(logging.INFO)
    try:
        call()
    finally:
        told.removeHandler(keeper)
        told.setLevel(level)
    return keeper.texts


def time_limits(job: Job) -> tuple[bool, float, float]:
    """Returns whether the stock loop's group has the limit it was made with, and the seconds of both others."""
    group: Any = dist.distributed_c10d._get_default_group()
    options = group._get_backend(torch.device("cpu")).options
    before = options._timeout
    trainer = build(job, {"dp": 2})
    settings = trainer.engine.config
    trainer.engine.close()
    return bool(options._timeout == before), settings.timeout_seconds, settings.silence_seconds


class Works(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps process 0 busy for longer than a silent one would be waited for."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 2 and args.process_index == 0:
            time.sleep(6.0)


class Busy(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Works()]}


def impatient(job: Job, layout: dict[str, Any]) -> Outcome:
    """Trains with a default for silent ranks that is shorter than process 0 is busy."""
    default = config.DEFAULT_COMM_TIMEOUT
    config.DEFAULT_COMM_TIMEOUT = 3.0
    try:
        return run_fold3d(job, layout)
    finally:
        config.DEFAULT_COMM_TIMEOUT = default


class Lingers(transformers.TrainerCallback):  # type: ignore[misc]
    """Process 0 has something to do when the training has ended."""

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if args.process_index == 0:
            time.sleep(8.0)


class Lingering(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Lingers()]}
