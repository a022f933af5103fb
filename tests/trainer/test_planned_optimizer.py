"""The planner is told of the training's optimizer before the stock Trainer makes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import fold3d
from fold3d.runtime.planning import _steps_parts


def planned(optim: str, optimizer: torch.optim.Optimizer | None = None) -> Any:
    args = fold3d.TrainingArguments(output_dir="unused", use_cpu=True, optim=optim, report_to=[])
    stock = transformers.Trainer.get_optimizer_cls_and_kwargs
    trainer: Any = SimpleNamespace(optimizer=optimizer, args=args, get_optimizer_cls_and_kwargs=stock)
    return fold3d.Trainer._optimizer_like(trainer)


@pytest.mark.parametrize(("optim", "parts"), [("adamw_torch", True), ("sgd", True), ("adafactor", False)])
def test_by_the_arguments(optim: str, parts: bool) -> None:
    assert _steps_parts(planned(optim)) is parts


def test_given_to_the_trainer() -> None:
    given = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.5, momentum=0.9)
    made = planned("adafactor", given)([torch.nn.Parameter(torch.zeros(2))])
    assert type(made) is torch.optim.SGD and (made.defaults["lr"], made.defaults["momentum"]) == (0.5, 0.9)


def test_of_a_library_that_is_missing() -> None:
    assert planned("galore_adamw") is None
