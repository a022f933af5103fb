"""enable_jit_checkpoint: a signal makes all ranks save and stop after the same step, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers

from fold3d.trainer.preemption import _grace
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

ARGUMENTS = {"enable_jit_checkpoint": True, "save_strategy": "steps", "save_steps": 100}
STEP = 2


class Told(transformers.TrainerCallback):
    """In the middle of a step, the last rank alone is asked to end."""

    def __init__(self, *, by_signal: signal.Signals | None = None) -> None:
        self.by_signal = by_signal
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the step that makes `STEP` steps."""
        if state.global_step != STEP - 1:
            return
        if self.by_signal is not None:
            os.kill(os.getpid(), self.by_signal)
        elif not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            self.manager.is_checkpoint_requested = True

    @property
    def manager(self) -> Any:
        """What waits for the signal."""
        callbacks = self.trainer.callback_handler.callbacks
        (manager,) = [one.jit_manager for one in callbacks if hasattr(one, "jit_manager")]
        return manager


class Preempted(Variant):
    """Says after which step training ended."""

    def __init__(self, *, by_signal: signal.Signals | None = None) -> None:
        self.told = Told(by_signal=by_signal)

    def trainer(self, base: type[Any]) -> type[Any]:
        told = self.told

        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                told.trainer = self
                self.add_callback(told)

        return Trainer

    def after(self, trainer: Any) -> int:
        self.told.trainer = None
        steps: int = trainer.state.global_step
        return steps


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2, "segments": 2}, {"dp": 2, "dp_sync": "zero1"}], ids=["pp", "dp"])
def test_all_ranks_save_after_the_same_step(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    job = Job(str(tmp_path / "told"), samples=40, variant=Preempted(), arguments=ARGUMENTS)
    assert [one.extra for one in ranks.run(run_fold3d, 2, job, layout)] == [STEP, STEP]
    folder = tmp_path / "told" / f"checkpoint-{STEP}"
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, "preempted.json"]
    mark = json.loads((folder.parent / "preempted.json").read_text())
    assert (mark["step"], mark["checkpoint"]) == (STEP, folder.name) and mark["seconds"] > 0
    steps_left = 4 - STEP
    assert mark["tokens_done"] > 0 and mark["tokens_left"] == pytest.approx(
        mark["tokens_done"] / STEP * steps_left, abs=1
    )

    resumed = replace(job, folder=str(tmp_path / "again"), resume=str(folder), variant=Variant())
    stock = run_stock(Job(str(tmp_path / "stock"), samples=40), replicas=layout.get("dp", 1))
    ours = ranks.run(run_fold3d, 2, resumed, layout)[0]
    assert ours.column("loss")[-2:] == pytest.approx(stock.column("loss")[-2:], rel=1e-6)
    assert_same(replace(ours, logs=[], metrics={}), replace(stock, logs=[], metrics={}), 1e-10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The step that it comes in is the last one."""
    before = signal.getsignal(number)
    arguments = ARGUMENTS | {"max_steps": 1000, "async_save": True}
    job = Job(str(tmp_path), variant=Preempted(by_signal=number), arguments=arguments)
    assert run_fold3d(job, {}).extra == STEP
    assert json.loads((tmp_path / "preempted.json").read_text())["checkpoint"] == f"checkpoint-{STEP}"
    assert (tmp_path / f"checkpoint-{STEP}" / "fold3d.json").is_file()
    assert signal.getsignal(number) is before


def test_the_mark_goes_when_training_goes_on(tmp_path: Path) -> None:
    job = Job(str(tmp_path), samples=40, variant=Preempted(), arguments=ARGUMENTS)
    run_fold3d(job, {})
    assert (tmp_path / "preempted.json").is_file()
    resumed = run_fold3d(replace(job, variant=Variant(), arguments=ARGUMENTS | {"resume": "auto"}), {})
    assert resumed.column("step")[-1] == 4 and not (tmp_path / "preempted.json").exists()


class Asked(Variant):
    """The process is asked to end while it evaluates after the second step, or has saved it."""

    def __init__(self, event: str) -> None:
        self.event = event

    def trainer(self, base: type[Any]) -> type[Any]:
        variant = self

        class Asks(transformers.TrainerCallback):
            asked = False

            def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.ask("evaluation", state)

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.ask("saving", state)

            def ask(self, event: str, state: Any) -> None:
                if event == variant.event and state.global_step == STEP and not self.asked:
                    self.asked = True  # not in the evaluation after the training
                    os.kill(os.getpid(), signal.SIGUSR2)

        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                self.add_callback(Asks())

        return Trainer

    def after(self, trainer: Any) -> tuple[int, list[str]]:
        return trainer.state.global_step, sorted(key for entry in trainer.state.log_history for key in entry)


@pytest.mark.parametrize("event", ["evaluation", "saving"])
def test_no_step_is_made_after_it(tmp_path: Path, event: str) -> None:
    """An evaluation ends at once, and has no result; a checkpoint of the step is not written twice."""
    arguments = ARGUMENTS | {"save_steps": STEP, "eval_strategy": "steps", "eval_steps": STEP}
    job = Job(str(tmp_path), samples=40, variant=Asked(event), arguments=arguments)
    steps, logged = run_fold3d(job, {}).extra
    assert steps == STEP and ("eval_loss" in logged) == (event == "saving")
    assert json.loads((tmp_path / "preempted.json").read_text())["checkpoint"] == f"checkpoint-{STEP}"
    assert (tmp_path / f"checkpoint-{STEP}" / "fold3d.json").is_file()


def test_a_checkpoint_that_would_come_too_late_is_not_begun(tmp_path: Path) -> None:
    """The one before counts, however many steps have been made since."""
    told = Preempted(by_signal=signal.SIGTERM)
    arguments = ARGUMENTS | {"save_steps": STEP - 1, "preemption_grace": 1e-6}
    assert run_fold3d(Job(str(tmp_path), samples=40, variant=told, arguments=arguments), {}).extra == STEP
    mark = json.loads((tmp_path / "preempted.json").read_text())
    assert (mark["step"], mark["checkpoint"]) == (STEP - 1, f"checkpoint-{STEP - 1}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{STEP - 1}", "preempted.json"]


def test_what_launchers_say_of_the_time_that_is_left() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "job"}
    assert _grace(signal.SIGTERM, torchrun, 0.0) == 30.0
    assert _grace(signal.SIGTERM, torchrun | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110"}, 0.0) == 110.0
    assert _grace(signal.SIGUSR1, torchrun, 0.0) == float("inf")
    assert _grace(signal.SIGUSR1, torchrun | {"SLURM_JOB_END_TIME": "1700000120"}, 1.7e9) == 120.0
