"""Models with several stacks, and with values that are read again, through the Trainer: as the stock Trainer's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.trace import stacks
from tests.trainer.jobs import (
    Job,
    Variant,
    assert_same,
    rows,
    run_fold3d,
    run_stock,
    stock_arguments,
    trainer_arguments,
)


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


AIAO, INTERLEAVED = LAYOUTS[1:3]
CASES = [
    *((family, *layout) for layout in LAYOUTS for family in ("t5", "bart", "clip", "mpnet", "seeing")),
    # Blocks that run several times, and a loss that reads what is made inside of blocks.
    *((family, *layout) for layout in (AIAO, INTERLEAVED) for family in ("albert", "mixtral")),
]


@pytest.mark.parametrize(
    ("family", "processes", "layout"), CASES, ids=[f"{case[2].get('schedule', 'tp')}-{case[0]}" for case in CASES]
)
def test_as_stock(ranks: RankPool, tmp_path: Path, family: str, processes: int, layout: dict[str, Any]) -> None:
    job = Job(str(tmp_path), variant=Of(family), arguments=ARGUMENTS)
    dp = layout.get("dp", 1)
    want = run_stock(job, replicas=dp)
    if dp > 1:  # means over processes, of losses that divide by the number of labels or do not
        want.metrics |= {"eval_loss": ranks.run(stock_evaluation, dp, job, want.weights)[0]}
    assert_same(ranks.run(run_fold3d, processes, job, layout)[0], want, 1e-10)


def stock_evaluation(job: Job, weights: dict[str, Tensor]) -> float:
    """Returns the loss of the stock Trainer's evaluation in several processes."""
    args = transformers.TrainingArguments(**stock_arguments(job))
    trainer = transformers.Trainer(args=args, **trainer_arguments(job))
    trainer.model.load_state_dict(weights)
    return trainer.evaluate()["eval_loss"]


def test_a_block_that_runs_several_times_is_saved_once(ranks: RankPool, tmp_path: Path) -> None:
    """And is resumed under another layout, to the same weights."""
    saving = ARGUMENTS | {"save_strategy": "steps", "save_steps": 1}
    job = Job(str(tmp_path / "whole"), variant=Of("albert"), arguments=saving)
    want = ranks.run(run_fold3d, AIAO[0], job, AIAO[1])[0]
    model, _ = stacks.build("albert")
    saved = load_file(tmp_path / "whole" / "checkpoint-2" / "model.safetensors")
    assert set(saved) <= set(model.state_dict()) and set(saved) >= {name for name, _ in model.named_parameters()}
    for name, value in saved.items():
        assert torch.equal(value, want.weights[name]), name
    again = replace(job, folder=str(tmp_path / "again"), resume=str(tmp_path / "whole" / "checkpoint-1"))
    resumed = ranks.run(run_fold3d, 2, again, {"pp": 2, "schedule": "1f1b"})[0]
    for name, value in want.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=0, atol=1e-12, msg=name)
