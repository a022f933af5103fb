"""One family of each kind through the Trainer, on four processes: losses, norms and weights of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock
from tests.trainer.test_stacks import stock_evaluation
from zoo.cases import KINDS, all_cases, select
from zoo.verdict import build

pytestmark = pytest.mark.dist

FAMILIES = {
    "causal": "Qwen3ForCausalLM",
    "masked": "RobertaForMaskedLM",
    "sequence to sequence": "PegasusForConditionalGeneration",
    "vision": "DeiTForImageClassification",
    "audio": "HubertForCTC",
    "multimodal": "LlavaForConditionalGeneration",
    "time series": "TimesFm2_5ModelForPrediction",
}
LABELS = {"TimesFm2_5ModelForPrediction": "future_values"}
LAYOUT: dict[str, Any] = {"dp": 2, "pp": 2, "segments": 2, "schedule": "aiao"}
SAMPLES = 2
"""Of a batch of the zoo."""


class Numbers(Dataset[dict[str, int]]):
    """Samples that say which of the batch's they are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"sample": number * number % 3 % SAMPLES}


class Of(Variant):
    """Of a class of the zoo, on its tiny model and samples of its batch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        [case] = select(all_cases(), [self.name])
        subject, why = build(case)
        assert subject is not None, why
        batch = subject.batch

        def collate(samples: list[dict[str, int]]) -> dict[str, Any]:
            chosen = [sample["sample"] for sample in samples]
            return {name: one[chosen] if isinstance(one, Tensor) else one for name, one in batch.items()}

        return {
            "model": subject.model,
            "train_dataset": Numbers(16),
            "eval_dataset": Numbers(6),
            "data_collator": collate,
        }


def test_each_kind_has_a_family() -> None:
    kinds = {case.name: case.kind for case in all_cases()}
    assert {kind: kinds[name] for kind, name in FAMILIES.items()} == {kind: kind for kind in KINDS}


@pytest.mark.parametrize("name", FAMILIES.values())
def test_as_stock_on_four_processes(ranks: RankPool, tmp_path: Path, name: str) -> None:
    arguments = {
        "max_steps": 3,
        "max_grad_norm": 1.0,
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "label_names": [LABELS.get(name, "labels")],
    }
    job = Job(str(tmp_path), variant=Of(name), arguments=arguments)
    before = torch.get_default_dtype()
    try:
        want = run_stock(job, replicas=LAYOUT["dp"])
    finally:
        torch.set_default_dtype(before)  # the zoo builds in another
    # Of several processes it is another mean, for losses that divide by the number of labels or do not.
    want.metrics |= {"eval_loss": ranks.run(stock_evaluation, LAYOUT["dp"], job, want.weights)[0]}
    found = ranks.run(run_fold3d, 4, job, LAYOUT, timeout=300.0)
    assert_same(found[0], want, 1e-10)
    assert all(one.column("loss") == found[0].column("loss") for one in found)
