"""The real Trainer on several processes against transformers.Trainer in one: logs, evaluation, final weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, assert_same, run_fold3d, run_stock

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # name: processes, layout, job
    "one process": (1, {}, {}),
    "one process, two segments": (1, {"segments": 2}, {"dtype": "float32"}),
    "two stages": (2, {"pp": 2}, {}),
    "two replicas": (2, {}, {"dtype": "float32"}),
    "folded": (
        4,
        {"dp": 2, "pp": 2, "segments": 2, "schedule": "aiao"},
        {"arguments": {"gradient_accumulation_steps": 4, "max_steps": 3}, "samples": 64},
    ),
    "everything auto": (
        4,
        {"pp": 2, "segments": "auto"},
        {"arguments": {"gradient_accumulation_steps": 4, "max_steps": 6}, "samples": 64, "layers": 6},
    ),
    "three stages, interleaved, llama": (
        3,
        {"pp": 3, "segments": 2, "schedule": "interleaved"},
        {"family": "llama", "layers": 6, "dtype": "float32"},
    ),
    "gpipe, untied, no clipping": (
        2,
        {"pp": 2, "schedule": "gpipe"},
        {"tied": False, "arguments": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3}},
    ),
    "epochs that do not divide": (
        2,
        {"pp": 2, "segments": 2},
        {
            "samples": 13,  # 7 micro-batches, the last of one sample: steps of 3, 3 and 1
            "arguments": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2},
        },
    ),
    "label smoothing": (2, {"pp": 2}, {"arguments": {"label_smoothing_factor": 0.1}}),
    "recompute, opt": (
        2,
        {"pp": 2, "segments": 2},
        {"family": "opt", "arguments": {"activation_checkpointing": True}},
    ),
    "recompute, by fold3d": (2, {"pp": 2, "segments": 2, "recompute": True}, {"family": "llama"}),
    "recompute, selected": (2, {"pp": 2, "segments": 2, "recompute": "self_attn,mlp"}, {"family": "llama"}),
    "evaluation on the way": (
        4,
        {"pp": 2},
        {
            "metrics": True,
            "arguments": {
                "eval_strategy": "steps",
                "eval_steps": 2,
                "eval_on_start": True,
                "include_for_metrics": ["inputs", "loss"],
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
            },
            "samples": 32,
        },
    ),
}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("name", CASES)
def test_parity(ranks: RankPool, tmp_path: Path, name: str) -> None:
    processes, layout, changes = CASES[name]
    job = Job(str(tmp_path), **changes)
    replicas = processes // layout.get("pp", 1)
    outcomes = ranks.run(run_fold3d, processes, job, layout)
    stock = run_stock(job, replicas=replicas)
    if replicas > 1:  # the loss of an evaluation batch is that of all replicas' batches, as under DDP
        several = ranks.run(run_stock, replicas, job)[0]
        stock.metrics = several.metrics
        logs = zip(several.logs, stock.logs, strict=True)
        stock.logs = [theirs if "eval_loss" in theirs else alone for theirs, alone in logs]
    assert_same(outcomes[0], stock, TOLERANCE[job.dtype])
    for other in outcomes[1:]:
        assert_same(other, outcomes[0], 0.0)
