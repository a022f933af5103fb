"""Models with several stacks, and with values that are read again, through the Trainer: as the stock Trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.trace import stacks
from tests.trainer.jobs import Job, Variant, assert_same, rows, run_fold3d, run_stock


class Of(Variant):
    """Of a family of `stacks.MODELS`, on batches that are padded to two lengths, or on images with texts."""

    def __init__(self, family: str) -> None:
        self.family = family

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        model, _ = stacks.build(self.family)
        return named | {"model": model, "data_collator": self.collate, "eval_dataset": rows(6, seed=4)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        count, seed = len(samples), int(samples[0]["input_ids"].sum())
        _, batch = stacks.build(self.family)
        if self.family in ("t5", "bart"):
            batch = stacks.text_to_text(seed)
        chosen = [row % 2 for row in range(count)]
        return {name: value[chosen] if isinstance(value, Tensor) else value for name, value in batch.items()}


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pp": 2, "schedule": "1f1b"}),
    (2, {"pp": 2, "segments": 2, "schedule": "aiao"}),
    (4, {"dp": 2, "pp": 2, "segments": 2, "schedule": "interleaved"}),
    (2, {"tp": 2}),
]
ARGUMENTS = {"prediction_loss_only": True, "max_steps": 2, "max_grad_norm": 1.0}


@pytest.mark.rotating
@pytest.mark.parametrize("family", ["t5", "bart", "clip", "mpnet", "seeing"])
@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=["1f1b", "aiao", "interleaved", "tp"])
def test_as_stock(ranks: RankPool, tmp_path: Path, family: str, processes: int, layout: dict[str, Any]) -> None:
    if family == "seeing" and "tp" in layout:
        pytest.skip("its own code asks a weight where it lies, and shards are looked for on a device that is none")
    job = Job(str(tmp_path), variant=Of(family), arguments=ARGUMENTS)
    dp = layout.get("dp", 1)
    want = run_stock(job, replicas=dp)
    if family != "clip":
        # So evaluates the stock Trainer with several processes, too: models that do not divide by the number of
        # labels, where there are labels.
        want.metrics["eval_loss"] *= dp
    assert_same(ranks.run(run_fold3d, processes, job, layout)[0], want, 1e-10)
