"""What training_step and _prepare_inputs set on the model for one micro-batch holds for that one, as in the stock
Trainer, although all of a step run behind the last one.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d.errors import ConfigError
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, error_of, run_fold3d, run_stock


class Switched(models.PlainModel):
    """Its loss is multiplied, and its blocks' results are added or not."""

    scale = 1.0
    adds = False

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = first = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x + first if self.adds else x))[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss * self.scale, "logits": logits}


class Setting(Variant):
    """By the number of the micro-batch."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(3)
        samples = [row for row in named["train_dataset"] if (row["labels"][1:] != -100).any()]
        return named | {"model": Switched().double().train(), "train_dataset": samples, "eval_dataset": samples[:4]}

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            number = 0

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                self.number += 1
                model.adds = self.number % 2 == 0
                return super().training_step(model, inputs, num_items_in_batch)

            def _prepare_inputs(self, inputs: Any) -> Any:
                inputs = super()._prepare_inputs(inputs)
                self.model.scale = float(inputs["input_ids"][0, 0])
                return inputs

        return Trainer


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"segments": 2}, {"segments": 1}, {"pp": 2}], ids=str)
def test_on_the_model(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    job = Job(str(tmp_path), variant=Setting(), arguments={"gradient_accumulation_steps": 4, "max_steps": 3})
    for ours in ranks.run(run_fold3d, layout.get("pp", 1), job, layout):
        assert_same(ours, run_stock(job), 1e-10)


class Shifting(Variant):
    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def _prepare_inputs(self, inputs: Any) -> Any:
                inputs = super()._prepare_inputs(inputs)
                return inputs | {"input_ids": (inputs["input_ids"] + 1) % models.VOCABULARY}

        return Trainer


@pytest.mark.gate
def test_batches_are_prepared_once(ranks: RankPool, tmp_path: Path) -> None:
    """In an evaluation they were prepared twice."""
    job = Job(str(tmp_path), layers=2, variant=Shifting())
    (ours,) = ranks.run(run_fold3d, 1, job, {})
    assert_same(ours, run_stock(job), 1e-10)


class Freezing(Setting):
    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            number = 0

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                self.number += 1
                model.head.weight.requires_grad_(self.number % 2 == 0)
                return super().training_step(model, inputs, num_items_in_batch)

        return Trainer


class Drawing(Setting):
    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def _prepare_inputs(self, inputs: Any) -> Any:
                if not hasattr(self.model, "draws"):
                    self.model.draws = itertools.cycle([1, 2, 3])
                self.model.scale = next(self.model.draws)
                return super()._prepare_inputs(inputs)

        return Trainer


REFUSED = {
    "weights": (Freezing(), "changes requires_grad of weights"),
    "iterator": (Drawing(), "takes the next of the model's iterator 'draws'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused(ranks: RankPool, tmp_path: Path, what: str) -> None:
    variant, why = REFUSED[what]
    (error,) = ranks.run(error_of, 1, Job(str(tmp_path), variant=variant), {}, ConfigError)
    assert why in error and "between the micro-batches of a step" in error
