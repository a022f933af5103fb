"""What a user's code asks, counts and reads through the Trainer means what it means in the stock Trainer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fold3d
from fold3d.errors import ConfigError, RankError
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer import user_jobs as jobs
from tests.trainer.jobs import Job, error_of


@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_the_accelerator_counts_replicas(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Sums and means too: stages of a replica bring the same number, and it counts once."""
    dp = layout.get("dp", 1)
    for found in ranks.run(jobs.exchanges, dp * layout.get("pp", 1), Job(str(tmp_path)), layout):
        each = [torch.tensor([own + 1.0, 10.0 * own]) for own in range(dp)]
        total = torch.stack(each).sum(0)
        assert found["sum"].equal(total) and found["default"].equal(total) and found["mean"].equal(total / dp)
        assert found["max"].equal(each[-1]) and not found["none"].any()
        assert found["gathered"].equal(torch.cat(each)) and found["of metrics"].equal(torch.cat(each))
        assert found["objects"] == [f"replica {own}" for own in range(dp)]
        rows = [[1.0] * (own + 1) + [-1.0] * (dp - 1 - own) for own in range(dp)]
        assert found["padded"].tolist() == rows
        assert found["padded first"].tolist() == [
            x for own in range(dp) for x in [0.0] * (dp - 1 - own) + [1.0] * (own + 1)
        ]
        assert found["triggered"] == [True, False]


@pytest.mark.parametrize("way", ["early", "zero1"])
def test_whoever_reads_weights_sees_them_whole(ranks: RankPool, tmp_path: Path, way: str) -> None:
    """In on_push_begin, in an overridden `log` and behind the optimizer; and fold3d is not in the user's list."""
    arguments = {"logging_strategy": "steps", "logging_steps": 1}
    job = Job(str(tmp_path), arguments=arguments)
    layout = {"dp": 2, "pp": 2, "segments": 2, "bucket_bytes": 1}
    found = ranks.run(jobs.reads, 4, job, layout | {"dp_sync": way})
    whole = models.build(models.MODELS["gpt2"](layers=4))
    count = sum(parameter.numel() for parameter in whole.parameters())
    for mine, serial in zip(found, ranks.run(jobs.reads, 4, job, layout | {"dp_sync": "serial"}), strict=True):
        for where in ("push", "log", "hook"):
            assert len(set(mine[where])) >= 4 and mine[where] == serial[where], where
        assert not any("lush" in name for name in mine["listed"]) and len(mine["listed"]) == 4
        assert mine["parameters"] in ([f"  Number of trainable parameters = {count:,}"], [])  # process 0 tells
    assert found[0]["parameters"]


def test_the_time_limit_is_that_of_the_user(ranks: RankPool, tmp_path: Path) -> None:
    """Process 0 may be busy for ddp_timeout, not for the 300 seconds of comm_timeout's default."""
    for is_as_before, exchanges, silence in ranks.run(
        jobs.time_limits, 2, Job(str(tmp_path), arguments={"ddp_timeout": 900})
    ):
        assert is_as_before and exchanges == 900 and silence == 300
    args = fold3d.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, comm_timeout=20)
    assert args.layout.timeout_seconds == args.layout.silence_seconds == 20


def test_a_busy_process_keeps_the_others_waiting(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), arguments={"ddp_timeout": 120}, variant=jobs.Busy())
    for outcome in ranks.run(jobs.impatient, 2, job, {"pp": 2}):
        assert len(outcome.column("loss")) == 4


def test_a_process_that_is_late_for_the_end_is_named(ranks: RankPool, tmp_path: Path) -> None:
    """The others wait for it to compare their memory, and it is not they who failed."""
    job = Job(str(tmp_path), arguments={"ddp_timeout": 3, "save_strategy": "no"}, variant=jobs.Lingering())
    for text in ranks.run(error_of, 2, job, {"pp": 2}, RankError):
        assert text.startswith("rank 0 (replica 0, stage 0) does not come in time"), text
        assert "Noticed by rank 1 (replica 0, stage 1) in comparing the memory of all ranks" in text


class Within(transformers.TrainerCallback):  # type: ignore[misc]
    """Does something to weights between the micro-batches of a step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        parameter = next(model.parameters())
        if self.what == "freezes":
            parameter.requires_grad_(False)
        elif self.what == "writes":
            with torch.no_grad():
                parameter.mul_(0.5)
        else:
            assert parameter.sum() != 0


@pytest.mark.parametrize("what", ["freezes", "writes", "reads"])
def test_weights_stay_as_they_are_within_a_step(tmp_path: Path, what: str) -> None:
    """The event comes before the micro-batches that it stands between are computed."""
    trainer = jobs.build(Job(str(tmp_path), layers=1, arguments={"max_steps": 1}), {})
    trainer.add_callback(Within(what))
    expects = contextlib.nullcontext() if what == "reads" else pytest.raises(ConfigError, match="on_substep_end")
    with expects:
        trainer.train()
    trainer.engine.close()
