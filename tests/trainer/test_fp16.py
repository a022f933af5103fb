"""fp16 in the Trainer: scales, skipped steps, schedules and checkpoints are those of the stock Trainer.

accelerate scales losses on accelerators only. Here it is made to do so on the CPU, for both Trainers alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import fold3d
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Outcome, Variant, assert_same, model_of, run_fold3d, run_stock

SCALER = {"init_scale": 2.0**40, "backoff_factor": 2.0**-8, "growth_factor": 2.0**6, "growth_interval": 2}
"""Steps are skipped at the beginning, and whenever the scale has grown."""
ARGUMENTS = {
    "fp16": True,
    "max_steps": 10,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-3,  # else it makes much of the last bits of sums
    "max_grad_norm": 0.05,
    "lr_scheduler_type": "cosine",
}
SAVED = 5


@contextlib.contextmanager
def scaling_on_the_cpu() -> Iterator[None]:
    """In its body accelerate takes the CPU for a device on which fp16 is scaled."""
    init = accelerate.Accelerator.__init__

    @functools.wraps(init)
    def call(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **SCALER)

    accelerate.Accelerator.__init__ = call
    try:
        yield
    finally:
        accelerate.Accelerator.__init__ = init


class Scaled(Variant):
    """Trains in fp16; says the scale, the schedule's step and, of ours, how many steps were skipped."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            reads_gradients = False

            def create_accelerator_and_postprocess(self) -> None:
                with scaling_on_the_cpu():
                    super().create_accelerator_and_postprocess()

        return Trainer

    def after(self, trainer: Any) -> Any:
        scaler = trainer.accelerator.scaler
        return scaler.get_scale(), trainer.lr_scheduler.last_epoch, getattr(scaler, "skipped_steps", None)


def finite(outcome: Outcome) -> Outcome:
    """Returns it with numbers that can be compared, without what only fold3d logs."""
    kept = [
        {k: v if math.isfinite(v) else -1.0 for k, v in entry.items() if k not in ("loss_scale", "skipped_steps")}
        for entry in outcome.logs
    ]
    return replace(outcome, logs=kept)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "processes, layout, changes",
    [
        (1, {}, {}),
        (2, {"pp": 2, "segments": 2}, {}),
        (2, {"pp": 2}, {"max_grad_norm": 0.0, "optim": "adamw_torch_fused"}),
        (2, {"dp": 2, "dp_sync": "zero1"}, {}),
        (2, {"dp": 2, "dp_sync": "early"}, {"optim": "adamw_torch_fused"}),
        (2, {"tp": 2}, {}),
        (4, {"dp": 2, "pp": 2, "segments": 2, "schedule": "aiao"}, {}),
    ],
)
def test_parity(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    replicas = layout.get("dp", 1)
    job = Job(str(tmp_path), dtype="float32", samples=64, variant=Scaled(), arguments=ARGUMENTS | changes)
    stock = run_stock(job, replicas=replicas)
    outcomes = ranks.run(run_fold3d, processes, job, layout)
    for ours in outcomes:
        assert ours.extra[:2] == stock.extra[:2]
        skipped = sum(not math.isfinite(norm) for norm in stock.column("grad_norm"))
        assert 0 < skipped < 9 and [ours.extra[2], ours.column("skipped_steps")[-1]] == [skipped, skipped]
        assert ours.column("loss_scale")[-1] == ours.extra[0]
    first = finite(outcomes[0])
    if replicas > 1:  # the loss of an evaluation batch is that of all replicas' batches
        stock.metrics = first.metrics
    assert_same(first, finite(stock), 5e-4 if layout.get("tp") else 2e-5)
    for other in outcomes[1:]:
        assert_same(finite(other), first, 0.0)


def test_resuming(ranks: RankPool, tmp_path: Path) -> None:
    """Each Trainer resumes the other's checkpoint with its scale; fold3d's goes on counting."""
    saving = ARGUMENTS | {"save_strategy": "steps", "save_steps": SAVED}
    job = Job(str(tmp_path / "stock"), dtype="float32", samples=64, variant=Scaled(), arguments=saving)
    stock = run_stock(job)
    ours = ranks.run(run_fold3d, 2, replace(job, folder=str(tmp_path / "ours")), {"pp": 2})[0]
    names = {path.name for path in (tmp_path / "stock" / f"checkpoint-{SAVED}").iterdir()}
    names = {name for name in names if not name.startswith("rng_state")}
    assert "scaler.pt" in names and names <= {p.name for p in (tmp_path / "ours" / f"checkpoint-{SAVED}").iterdir()}

    def resumed(who: str) -> Job:
        return replace(job, folder=str(tmp_path / "again"), resume=str(tmp_path / who / f"checkpoint-{SAVED}"))

    of_stock = ranks.run(run_fold3d, 2, resumed("stock"), {"pp": 2, "segments": 2})[0]
    of_ours = ranks.run(run_fold3d, 2, resumed("ours"), {"dp": 2})[0]
    by_stock = run_stock(resumed("ours"))
    assert of_ours.extra[2] == ours.extra[2] and of_stock.extra[:2] == by_stock.extra[:2] == stock.extra[:2]
    for outcome in (of_stock, by_stock):
        assert_same(replace(outcome, logs=[], metrics={}), replace(stock, logs=[], metrics={}), 2e-5)


@pytest.mark.full
def test_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    args = fold3d.TrainingArguments(output_dir=str(tmp_path), fp16=True, use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match=r"fp16=True has no effect on the cpu.*use bf16=True"):
        fold3d.Trainer(model_of(Job("")), args, train_dataset=[])
