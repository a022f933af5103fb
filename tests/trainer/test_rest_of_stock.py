"""The rest of the stock Trainer's arguments and methods: over two processes they do what the stock code does on one."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback
from transformers.integrations import integration_utils

import fold3d
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock, stock_arguments, trainer_arguments

STAGES = {"pp": 2, "segments": 1}


def trainer_of(folder: str, layout: dict[str, Any] | None, arguments: dict[str, Any], **named: Any) -> Any:
    """Returns a stock Trainer where there is no layout, else fold3d's."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    job = Job(folder, arguments={"max_steps": 2} | arguments)
    kind: Any = transformers if layout is None else fold3d
    args = kind.TrainingArguments(**stock_arguments(job), **(layout or {}))
    return kind.Trainer(args=args, **trainer_arguments(job), **named)


def close(trainer: Any) -> None:
    if isinstance(trainer, fold3d.Trainer):
        trainer.engine.close()


class Steps(TrainerCallback):
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += 1


class Others(Steps):
    """Of another type, by which it is removed."""


def methods(folder: str, layout: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what methods that fold3d leaves to the stock code have returned and written."""
    quiet = {"log_level": "info", "log_level_replica": "error", "log_on_each_node": False, "skip_memory_metrics": False}
    trainer = trainer_of(folder, layout, quiet, callbacks=[Others()])
    added = Steps()
    trainer.add_callback(added)
    removed = trainer.pop_callback(Others)
    trainer.add_callback(removed)
    trainer.remove_callback(Others)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    result = trainer.train()
    trainer.save_state()
    trainer.create_model_card(model_name="tiny")
    with trainer.autocast_smart_context_manager():
        dtype = torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
    found = {
        "steps": added.count,
        "removed": (type(removed), removed.count),
        "popped": trainer.pop_callback(added) is added,
        "sizes": (trainer.get_cp_size(), trainer.get_sp_size(), trainer.get_tp_size()),
        "rates": trainer.get_learning_rates(),
        "groups": len(trainer.get_optimizer_group()),
        "dtype": dtype,
        "memory": sorted(name for name in result.metrics if "_mem_cpu_" in name),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "level": trainer.args.get_process_log_level(),
        "zero": trainer.is_local_process_zero(),
    }
    close(trainer)
    return found


def test_methods(ranks: RankPool, tmp_path: Path) -> None:
    stock = methods(str(tmp_path / "stock"), None)
    first, second = ranks.run(methods, 2, str(tmp_path / "ours"), STAGES)
    assert first.pop("losses") == pytest.approx(stock["losses"], rel=1e-10)
    assert second.pop("losses") == pytest.approx(stock.pop("losses"), rel=1e-10)
    assert first == stock
    assert stock["steps"] == 2 and stock["memory"] and stock["level"] == logging.INFO and stock["zero"]
    assert second == stock | {"level": logging.ERROR, "zero": False}
    for name in ("README.md", "trainer_state.json"):
        assert (tmp_path / "ours" / name).stat().st_size > 0


class Hub:
    """Stands for the hub; notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, name: str, **named: Any) -> SimpleNamespace:
        self.calls.append(("create_repo", {"name": name} | named))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, folder_path: str, **named: Any) -> Future[None]:
        names = sorted(path.name for path in Path(folder_path).iterdir() if path.suffix == ".safetensors")
        self.calls.append(("upload_folder", {"files": names} | named))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def hub_calls(folder: str, layout: dict[str, Any] | None, strategy: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns what the hub was asked by this process, in a training that pushes, and at its end."""
    hub, stock = Hub(), transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: hub
    try:
        told = {"push_to_hub": True, "hub_model_id": "mine", "hub_token": "secret", "hub_private_repo": True}
        told |= {"hub_strategy": strategy, "hub_always_push": True, "hub_revision": "draft"}
        trainer = trainer_of(folder, layout, told | {"save_strategy": "steps", "save_steps": 1})
        trainer.train()
        trainer.push_to_hub()
        trainer.init_hf_repo()
        close(trainer)
    finally:
        transformers.trainer.hf_api = stock
    return hub.calls


@pytest.mark.parametrize("strategy", ["end", "checkpoint"])
def test_the_hub_is_asked_for_the_same(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    stock = hub_calls(str(tmp_path / "stock"), None, strategy)
    first, second = ranks.run(hub_calls, 2, str(tmp_path / "ours"), STAGES, strategy)
    assert first == stock and second == []
    assert Counter(what for what, _ in stock) == {"create_repo": 2, "upload_folder": 1 if strategy == "end" else 5}
    assert all(named["token"] == "secret" for _, named in stock)
    assert all(named["revision"] == "draft" for what, named in stock if what == "upload_folder")


@contextlib.contextmanager
def trackio() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """In its body a module of this name notes its calls."""
    calls: list[tuple[str, dict[str, Any]]] = []
    fake: Any = types.ModuleType("trackio")
    fake.__version__ = "0.30"
    fake.init = lambda **named: calls.append(("init", named))
    fake.log = lambda logs: calls.append(("log", dict(logs)))
    fake.freeze = lambda **named: calls.append(("freeze", named))
    fake.finish = lambda: calls.append(("finish", {}))
    fake.config = SimpleNamespace(update=lambda *_, **__: None)
    space = SimpleNamespace(get=lambda: "me/space")
    fake.context_vars = SimpleNamespace(current_space_id=space, current_project=space)
    type(fake.config).__setitem__ = lambda *_: None  # type: ignore[attr-defined]
    stock = integration_utils.is_trackio_available
    sys.modules["trackio"], integration_utils.is_trackio_available = fake, lambda: True
    try:
        yield calls
    finally:
        del sys.modules["trackio"]
        integration_utils.is_trackio_available = stock


def reported(folder: str, layout: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """Returns what a reporter was told by this process."""
    told = {"report_to": "trackio", "run_name": "first", "project": "mine", "trackio_space_id": "me/space"}
    told |= {"trackio_bucket_id": "me/bucket", "trackio_static_space_id": "me/static"}
    with trackio() as calls:
        trainer = trainer_of(folder, layout, told)
        trainer.train()
        close(trainer)
    return calls


def test_reports_are_those_of_process_zero_with_keys_in_groups(ranks: RankPool, tmp_path: Path) -> None:
    stock = reported(str(tmp_path / "stock"), None)
    first, second = ranks.run(reported, 2, str(tmp_path / "ours"), STAGES)
    assert second == []
    assert [one for one in first if one[0] != "log"] == [one for one in stock if one[0] != "log"]
    begun = next(named for what, named in stock if what == "init")
    assert (begun["name"], begun["project"], begun["bucket_id"]) == ("first", "mine", "me/bucket")
    logs, plain = ([named for what, named in calls if what == "log"] for calls in (first, stock))
    assert len(logs) == len(plain) > 2
    for ours, theirs in zip(logs, plain, strict=True):
        assert set(theirs) <= set(ours)
        assert {key.partition("/")[0] for key in set(ours) - set(theirs)} <= {"perf", "comm", "memory"}
    assert {"perf/step_ms", "comm/pp_exposed_ms", "memory/peak_memory_mb", "train/loss"} <= set(logs[0])
    assert integration_utils.rewrite_logs({"step_ms": 1.0}) == {"train/step_ms": 1.0}, "the stock one is back"


class Batches(Variant):
    """Metrics that are computed batch by batch, and an optimizer by its class."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        seen: list[float] = []

        def compute_metrics(prediction: Any, compute_result: bool = False) -> dict[str, float]:
            seen.append(float((prediction.predictions.argmax(-1) == prediction.label_ids).double().mean()))
            return {"right": sum(seen) / len(seen)} if compute_result else {}

        kind = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
        return named | {"compute_metrics": compute_metrics, "optimizer_cls_and_kwargs": kind}


def test_metrics_of_batches_and_an_optimizer_by_its_class(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), arguments={"batch_eval_metrics": True}, variant=Batches())
    ours = ranks.run(run_fold3d, 2, job, STAGES)
    alone = run_stock(job)
    assert "eval_right" in alone.metrics
    for one in ours:
        assert_same(one, alone, 1e-10)


def determined(folder: str, layout: dict[str, Any]) -> tuple[list[float], bool]:
    """Returns the losses of a run with dropout, and whether torch was told to be deterministic."""
    try:
        job = Job(folder, dropout=0.1, arguments={"full_determinism": True})
        return run_fold3d(job, layout).column("loss"), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def sometimes_nan(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is NaN, with a gradient, for every other micro-batch or so."""
    loss: torch.Tensor = outputs["logits"].square().mean()
    return loss + torch.where(labels.sum() % 2 == 0, torch.nan, 0.0)


@pytest.mark.parametrize("layout", [{"segments": 1}, {"segments": 2}], ids=str)
def test_losses_that_are_not_finite(tmp_path: Path, layout: dict[str, Any]) -> None:
    """One of a step's micro-batches made the loss that is logged of the step 0."""
    found = []
    for one in (None, layout):
        arguments = {"max_steps": 6, "logging_steps": 2}
        trainer = trainer_of(str(tmp_path), one, arguments, compute_loss_func=sometimes_nan)
        trainer.train()
        logs = trainer.state.log_history
        found.append([entry["loss"] for entry in logs if "loss" in entry] + [logs[-1]["train_loss"]])
        close(trainer)
    assert found[1] == pytest.approx(found[0], rel=1e-4) and 0.0 not in found[0]


def test_full_determinism(ranks: RankPool, tmp_path: Path) -> None:
    runs = [ranks.run(determined, 2, str(tmp_path / name), STAGES)[0] for name in ("first", "second")]
    assert runs[0] == runs[1] and runs[0][1]


@pytest.mark.parametrize("kind", [fold3d.TrainingArguments, transformers.TrainingArguments])
def test_tf32_is_set_by_the_stock_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any) -> None:
    told: list[bool] = []
    monkeypatch.setattr(transformers.training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(transformers.training_args, "enable_tf32", told.append)
    kind(output_dir=str(tmp_path), use_cpu=True, tf32=True)
    assert told == [True]


def test_torch_compile_mode_goes_with_the_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("BACKEND", "MODE"):  # the stock arguments set them for the whole process
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "no")
    told = {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "reduce-overhead"}
    trainer = trainer_of(str(tmp_path), {"segments": 1}, told)
    options = trainer._compile_options()
    close(trainer)
    assert options is not None and options["mode"] == "reduce-overhead" and options["backend"] == "inductor"
