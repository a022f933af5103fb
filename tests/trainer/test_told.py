"""What a user is told of a training beside its logs: the set-up, losses that are not finite, models without values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import fold3d
from fold3d.errors import ConfigError
from fold3d.trainer import measuring
from fold3d.trainer.measuring import Throughput
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, stock_arguments, trainer_arguments


def trainer_of(job: Job, kind: type[Any] = fold3d.Trainer, **layout: Any) -> Any:
    args = fold3d.TrainingArguments(**stock_arguments(job), **({"segments": 1} | layout))
    return kind(args=args, **trainer_arguments(job))


def test_set_up_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 17.0, 20.0, 22.0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(now))
    throughput = Throughput()
    for set_up in (4.5, 0.0):
        throughput.start(1.0)
        throughput.count(100)
        assert throughput.stop(1.0 + set_up) == set_up
    assert throughput.read() == (200, 2.5 + 2.0)
    assert throughput.step_ms == 2000.0


def test_set_up_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(measuring, "_TOLD_SECONDS", 0.0001)
    trainer = trainer_of(Job(str(tmp_path)), segments=2)
    trainer.train()
    assert capsys.readouterr().err.count("fold3d: set up in ") == 1
    assert trainer.engine.setup_seconds > 0
    trainer.engine.close()


class Breaks(fold3d.Trainer):
    """Its loss is NaN on replica 0, from its third step on."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **named)
        return loss * (float("nan") if self.state.global_step >= 2 and self.accelerator.process_index == 0 else 1.0)


def warnings_of(folder: str, layout: dict[str, Any]) -> list[str]:
    """Returns what this process warned of in a training whose loss breaks."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fold3d.trainer.measuring").addHandler(handler)
    try:
        trainer = trainer_of(Job(folder, arguments={"max_steps": 6, "logging_steps": 2}), Breaks, **layout)
        trainer.train()
        trainer.engine.close()
    finally:
        logging.getLogger("fold3d.trainer.measuring").removeHandler(handler)
    return [text for text in said if "not finite" in text]


def test_a_loss_that_is_not_finite_is_told_once_with_its_first_step(tmp_path: Path) -> None:
    (told,) = warnings_of(str(tmp_path), {})
    assert "not finite (NaN or infinite) since step 3" in told


def test_one_replica_s_loss_is_told_by_process_zero(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(warnings_of, 2, str(tmp_path), {"dp": 2})
    assert len(first) == 1 and "since step 3" in first[0] and second == []


def test_a_model_without_values_trains_only_when_told_so(tmp_path: Path) -> None:
    trainer = trainer_of(Job(str(tmp_path), on_meta=True))
    with pytest.raises(
        ConfigError, match=r"has no values: set weights to the folder .* weights=.random. to train from"
    ):
        trainer.train()
    trainer.engine.close()
    told = trainer_of(
        Job(str(tmp_path), on_meta=True, arguments={"save_strategy": "steps", "save_steps": 2}), weights="random"
    )
    told.train()
    told.train()  # its values are no longer random
    told.engine.close()
    resumed = trainer_of(Job(str(tmp_path), on_meta=True, arguments={"max_steps": 5}))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 5
    resumed.engine.close()
    with pytest.raises(ConfigError, match="weights='random' has no effect: the model has weights"):
        trainer_of(Job(str(tmp_path)), weights="random")
