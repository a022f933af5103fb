"""Reporters that are installed get the keys of fold3d in groups, from process 0: TensorBoard, W&B offline, MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fold3d
from tests.trainer.jobs import Job, stock_arguments, trainer_arguments

GROUPED = {"train/loss", "perf/step_ms", "perf/tokens_per_second", "memory/peak_memory_mb"}


def train(folder: Path, reporter: str) -> None:
    job = Job(str(folder), arguments={"max_steps": 2, "report_to": reporter, "run_name": "first"})
    args = fold3d.TrainingArguments(**stock_arguments(job), segments=1)
    trainer = fold3d.Trainer(args=args, **trainer_arguments(job))
    trainer.train()
    trainer.engine.close()


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "tensorboard")
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= GROUPED
    assert [one.step for one in events.Scalars("perf/step_ms")] == [1, 2]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, Any]] = []
    log = wandb.sdk.wandb_run.Run.log

    def noted(run: Any, data: dict[str, Any], *args: Any, **named: Any) -> Any:
        seen.append(dict(data))
        return log(run, data, *args, **named)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", noted)
    train(tmp_path, "wandb")
    wandb.finish()
    assert set(seen[0]) >= GROUPED and list(tmp_path.rglob("run-*.wandb"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "fold3d")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    train(tmp_path, "mlflow")
    mlflow.end_run()
    names = {path.name for path in (tmp_path / "runs").rglob("metrics/*")}
    assert {"loss", "step_ms", "tokens_per_second", "peak_memory_mb"} <= names, "MLflow gets plain names"
