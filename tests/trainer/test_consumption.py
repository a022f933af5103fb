"""Building the engine takes nothing from data sets, collators and generators that the stock Trainer would not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, collate, rows, run_fold3d, run_stock


class Masking:
    """A collator with a generator of its own, like DataCollatorForLanguageModeling(seed=5), and a counter."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.calls = 0

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.calls += 1
        batch = collate(samples)
        masked = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        batch["input_ids"] = batch["input_ids"].masked_fill(masked, 1 + self.calls % 5)
        return batch


class Counting(Dataset[dict[str, Tensor]]):
    """What a sample is depends on how many were asked for."""

    def __init__(self) -> None:
        self.rows, self.asked = rows(16), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked += 1
        return {
            **self.rows[index],
            "labels": self.rows[index]["labels"].masked_fill(torch.tensor(self.asked % 7 < 2), 3),
        }


class Streaming(IterableDataset[dict[str, Tensor]]):
    """Goes on with its generator wherever the last reader stopped."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)

    def __iter__(self) -> Any:
        for _ in range(40):
            ids = torch.randint(2, models.VOCABULARY, (7,), generator=self.generator)
            yield {"input_ids": ids, "labels": ids}


class Keeps(Variant):
    def __init__(self, data: type[Any] | None) -> None:
        self.data = data

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        if self.data is None:
            return named | {"data_collator": Masking()}
        return named | {"train_dataset": self.data()}


LAYOUTS = [(1, {"segments": 1}), (1, {"segments": 2}), (2, {"pp": 2, "segments": "auto"})]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=lambda value: str(value))
@pytest.mark.parametrize("data", [None, Counting, Streaming])
def test_losses_are_the_stock_ones(
    ranks: RankPool, tmp_path: Path, data: type[Any] | None, processes: int, layout: dict[str, Any]
) -> None:
    job = Job(str(tmp_path), variant=Keeps(data))
    assert_same(ranks.run(run_fold3d, processes, job, layout)[0], run_stock(job), 1e-10)


class Images(nn.Module):
    """A plain module of blocks without input_ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            features = features + torch.tanh(layer(features))
        found = self.head(features).squeeze(-1)
        return {"loss": (found - target).square().mean(), "found": found}


class Samples(IterableDataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        for _ in range(100):
            features = torch.randn(6, generator=self.generator, dtype=torch.float64)
            yield {"features": features, "target": features.sum()}


class OfSamples(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        features = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
        held = [{"features": row, "target": row.sum()} for row in features]
        return {"model": Images().double(), "train_dataset": Samples(), "eval_dataset": held}


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS[1:], ids=lambda value: str(value))
def test_a_plain_module_on_a_stream(ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any]) -> None:
    job = Job(str(tmp_path), variant=OfSamples(), arguments={"max_steps": 3, "save_strategy": "steps", "save_steps": 2})
    assert_same(ranks.run(run_fold3d, processes, job, layout)[0], run_stock(job), 1e-10)


class Passes(IterableDataset[dict[str, Tensor]]):
    """Without a length; a pass ends within an optimizer step of four micro-batches."""

    def __iter__(self) -> Any:
        yield from rows(10)


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_a_pass_that_ends_within_a_step(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any]
) -> None:
    """The gradients of its last micro-batches count in the first step of the next pass."""
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 7}
    job = Job(str(tmp_path), variant=Keeps(Passes), arguments=steps)
    assert_same(ranks.run(run_fold3d, processes, job, layout)[0], run_stock(job), 1e-10)


class Evaluates(Keeps):
    """Evaluation comes first, with batches of its own; it draws what the stock Trainer draws."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def train(self, *args: Any, **named: Any) -> Any:
                self.evaluate()
                return super().train(*args, **named)

        return Trainer


def test_evaluation_first(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), variant=Evaluates(None))
    assert_same(ranks.run(run_fold3d, 2, job, {"pp": 2, "segments": 2})[0], run_stock(job), 1e-10)
