"""The planner is told of the training's optimizer before the stock Trainer makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fold3d
from fold3d.engine.planning.planner import steps_parts


class OwnOptimizer(fold3d.Trainer):
    """Makes its optimizer itself, whatever the arguments name."""

    def create_optimizer(self, model: Any = None) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def planned(
    optim: str, optimizer: torch.optim.Optimizer | None = None, kind: type[fold3d.Trainer] = fold3d.Trainer
) -> Any:
    trainer = object.__new__(kind)  # only what the question needs: no model, no data
    trainer.args = fold3d.TrainingArguments(output_dir="unused", use_cpu=True, optim=optim, report_to=[])
    trainer.optimizer, trainer.optimizer_cls_and_kwargs = optimizer, None
    return trainer._optimizer_like()


@pytest.mark.parametrize(("optim", "parts"), [("adamw_torch", True), ("sgd", True), ("adafactor", False)])
def test_by_the_arguments(optim: str, parts: bool) -> None:
    assert steps_parts(planned(optim)) is parts


def test_given_to_the_trainer() -> None:
    given = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.5, momentum=0.9)
    made = planned("adafactor", given)([torch.nn.Parameter(torch.zeros(2))])
    assert type(made) is torch.optim.SGD and (made.defaults["lr"], made.defaults["momentum"]) == (0.5, 0.9)


def test_of_a_library_that_is_missing() -> None:
    with pytest.raises(fold3d.ConfigError, match=r"optim='galore_adamw' cannot be had: .*install"):
        planned("galore_adamw")


def test_of_a_library_that_is_missing_and_not_asked_for() -> None:
    assert planned("galore_adamw", kind=OwnOptimizer) is None
