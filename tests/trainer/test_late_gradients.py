"""What the Trainer refuses with gradient_delay=1, and when what waits is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import fold3d
from fold3d.errors import ConfigError
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case

CASE = Case(m=2, gradient_delay=1, through="trainer", layers=2, dtype="float32")


class Reader(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **named: Any) -> None:
        """May read gradients."""


class Watcher(TrainerCallback):
    """Keeps the weights that callbacks see."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        """A step is over."""
        self.seen.append(model.lm_head.weight.detach().clone())

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        """All updates are there."""
        self.seen.append(model.lm_head.weight.detach().clone())


def trainer(folder: Path, callback: TrainerCallback) -> fold3d.Trainer:
    named = parity_jobs.trainer_arguments(CASE, str(folder)) | {"gradient_accumulation_steps": CASE.m}
    return fold3d.Trainer(
        model=parity_jobs.build(CASE),
        args=fold3d.TrainingArguments(**named, **parity_jobs.layout_of(CASE)),
        train_dataset=parity_jobs.dataset(CASE),
        data_collator=parity_jobs.collate,
        callbacks=[callback],
    )


def test_who_may_read_gradients_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, Reader())
    with pytest.raises(ConfigError, match=r"Reader\.on_pre_optimizer_step"):
        made.train()
    made.engine.close()


def test_callbacks_see_the_weights_of_their_step_and_the_last_one_all_updates(tmp_path: Path) -> None:
    watcher = Watcher()
    made = trainer(tmp_path, watcher)
    first = made.model.lm_head.weight.detach().clone()
    made.train()
    assert torch.equal(watcher.seen[0], first), "the first step takes no gradients"
    assert len(watcher.seen) == 4
    assert not any(torch.equal(a, b) for a, b in zip(watcher.seen, watcher.seen[1:], strict=False))
    assert torch.equal(made.model.lm_head.weight, watcher.seen[-1])
    before = watcher.seen[-1].clone()
    made.train()  # anew, with nothing that waits
    assert torch.equal(watcher.seen[4], before)
    made.engine.close()
