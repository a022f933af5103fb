"""An evaluation's loss is that of one process, whatever the model's loss is divided by."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankPool

ROWS = 16


def rows(kind: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for row in range(ROWS):
        ids = torch.randint(1, models.VOCABULARY, (8,), generator=generator)
        labels = torch.tensor(row % 2) if kind == "classes" else ids
        found.append({"input_ids": ids, "labels": labels})
    return found


def unweighted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean of one's own, which does not look at the labels of all replicas."""
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def evaluated(layout: dict[str, int], kind: str, folder: str) -> tuple[float, float]:
    """Returns the losses of an evaluation and of a prediction."""
    config = models.bert_config(layers=2)
    classes = kind == "classes"
    build = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForMaskedLM
    model = models.build(config, dtype=torch.float64, kind=build)
    args = fold3d.TrainingArguments(
        output_dir=folder, per_device_eval_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True, **layout
    )
    own = {"compute_loss_func": unweighted} if kind == "own" else {}
    trainer = fold3d.Trainer(model, args, eval_dataset=rows(kind), **own)
    return trainer.evaluate()["eval_loss"], trainer.predict(rows(kind)).metrics["test_loss"]


@functools.cache
def alone(pool: RankPool, kind: str, folder: str) -> tuple[float, float]:
    found: tuple[float, float] = pool.run(evaluated, 1, {}, kind, folder)[0]
    return found


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["classes", "tokens", "own"])
def test_of_several_replicas(
    ranks: RankPool, kind: str, layout: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("runs"))
    expected = alone(ranks, kind, folder)
    for found in ranks.run(evaluated, 2 * layout.get("pp", 1), layout, kind, folder, timeout=150.0):
        assert found == pytest.approx(expected, rel=1e-9)
