"""The vocabulary in parts through the Trainer: losses, metrics and predictions are the stock Trainer's."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d.tensor_parallel.vocabulary import VocabularyParallelLogits
from tests.helpers.ranks import RankPool
from tests.trainer import jobs
from tests.trainer.jobs import Job, Variant

LAYOUTS = [{"tp": 2}, {"tp": 2, "pp": 2, "recompute": True}, {"tp": 2, "tp_overlap": "sub"}]


class Predicts(Variant):
    """Predicts after training, on every process."""

    def after(self, trainer: Any) -> Tensor:
        predicted = trainer.predict(jobs.rows(4, seed=9)).predictions
        return torch.as_tensor(predicted)


class OwnLoss(Predicts):
    """A loss that looks into logits, beside the usual one."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Confident(base):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
                if torch.distributed.is_initialized() and model.training:
                    assert isinstance(outputs.logits, VocabularyParallelLogits)
                spread = outputs.logits.topk(2, -1).values.std(-1).sum()
                loss = outputs.loss + 1e-3 * spread / (num_items_in_batch or 1)
                return (loss, outputs) if return_outputs else loss

        return Confident


CASES: dict[str, dict[str, Any]] = {
    "metrics": {"metrics": True, "family": "gpt2", "variant": Predicts()},
    "smoothed": {"family": "llama", "arguments": {"label_smoothing_factor": 0.1}, "variant": Predicts()},
    "own loss": {"family": "opt", "metrics": True, "variant": OwnLoss()},
    "bf16": {"family": "llama", "dtype": "float32", "arguments": {"bf16": True}, "variant": Predicts()},
}


@cache
def stock(case: str, folder: str) -> jobs.Outcome:
    return jobs.run_stock(Job(folder, **CASES[case]))


@pytest.mark.parametrize("case, layout", [*itertools.product(CASES, LAYOUTS), ("smoothed", {"tp": 4})], ids=str)
def test_as_the_stock_trainer(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, case: str, layout: dict[str, Any]
) -> None:
    folder = str(Path(tmp_path_factory.getbasetemp()) / case.replace(" ", "-"))
    expected = stock(case, folder)
    world = layout["tp"] * layout.get("pp", 1)
    for ours in ranks.run(jobs.run_fold3d, world, Job(folder, **CASES[case]), layout, timeout=150.0):
        # transformers' losses are computed in fp32; bf16 rounds sums of parts in another order
        tolerance = 5e-2 if case == "bf16" else 2e-6
        jobs.assert_same(ours, expected, tolerance)
        torch.testing.assert_close(ours.extra, expected.extra, rtol=0, atol=20 * tolerance)
