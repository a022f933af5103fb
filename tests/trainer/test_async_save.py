"""async_save: checkpoints are written while training goes on, and are complete or not there."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fold3d.checkpoint import write_all
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Outcome, Variant, run_fold3d
from tests.trainer.test_checkpoints import BEST, FOLDED, SAVING, STEP, assert_continues, continued

ASYNC = SAVING | {"async_save": True}


def same_files(first: Path, second: Path) -> bool:
    """Whether two checkpoints have the same files with the same tensors."""
    for file in ("model.safetensors", "optimizer.pt"):
        a, b = (load_file(f / file) if file[0] == "m" else torch.load(f / file) for f in (first, second))
        if file == "optimizer.pt":
            assert a["param_groups"] == b["param_groups"]
            a, b = ({(i, k): v for i, s in one["state"].items() for k, v in s.items()} for one in (a, b))
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            return False
    return {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}


@pytest.mark.gate
def test_it_is_the_same_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """Weights and states go on changing while their copies are written."""
    jobs = [Job(str(tmp_path / name), samples=40, arguments=SAVING) for name in ("waits", "goes on")]
    jobs[1] = replace(jobs[1], arguments=ASYNC)
    waits, goes_on = (ranks.run(run_fold3d, 4, job, FOLDED)[0] for job in jobs)
    assert_continues(goes_on, waits, 0.0)
    for step in (3, 6):
        assert same_files(*(Path(job.folder) / f"checkpoint-{step}" for job in jobs))
    assert {path.name for path in (tmp_path / "goes on").iterdir()} == {"checkpoint-3", "checkpoint-6"}


def test_a_run_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    layout = FOLDED | {"gradient_delay": 1}
    job = Job(str(tmp_path / "whole"), dtype="float32", dropout=0.1, samples=24, arguments=ASYNC)
    whole = ranks.run(run_fold3d, 4, job, layout)[0]
    resumed = ranks.run(run_fold3d, 4, continued(job, tmp_path / "again"), layout)[0]
    assert_continues(resumed, whole, 0.0)


class Watched(Variant):
    """The checkpoint of step 3 is not written before step 6 begins; notes what callbacks see."""

    def trainer(self, base: type[Any]) -> type[Any]:
        self.go = threading.Event()
        self.seen: dict[int, list[str]] = {}
        self.told: list[tuple[int, bool, bool]] = []
        watched = self

        class Notes(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watched.seen[state.global_step] = sorted(
                    path.name for path in Path(args.output_dir).glob("checkpoint*")
                )
                if state.global_step == 5:
                    watched.go.set()

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                saved = json.loads((folder / "trainer_state.json").read_text())
                watched.told.append(
                    (state.global_step, (folder / "fold3d.json").is_file(), saved["epoch"] == state.epoch)
                )

        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                self.add_callback(Notes())

        return Trainer

    def write(self, folder: Path, writes: Any) -> None:
        self.go.wait(120)
        write_all(folder, writes)


def test_training_goes_on_and_callbacks_see_complete_folders(tmp_path: Path) -> None:
    watched = Watched()
    arguments = ASYNC | {"max_steps": 7, "gradient_accumulation_steps": 1}
    job = Job(str(tmp_path), samples=40, variant=watched, arguments=arguments)
    with mock.patch("fold3d.checkpoint.delivery.write_all", watched.write):
        run_fold3d(job, {})
    assert [watched.seen[step] for step in (2, 3, 4, 5)] == [[], [], [], []]
    assert watched.told == [(3, True, True), (6, True, True), (7, True, True)]


def test_limit_and_best_model(ranks: RankPool, tmp_path: Path) -> None:
    jobs = [Job(str(tmp_path / name), arguments=BEST | more) for name, more in (("a", {}), ("b", {"async_save": True}))]
    waits, goes_on = (ranks.run(run_fold3d, 2, job, {"pp": 2})[0] for job in jobs)
    assert_continues(goes_on, waits, 0.0)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["checkpoint-1", "checkpoint-4"]
    states = [json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text()) for name in "ab"]
    best = [Path(state["best_model_checkpoint"]).name for state in states]
    assert best == ["checkpoint-1", "checkpoint-1"]


# resume="auto"


def test_it_goes_on_with_the_world_that_came_up(ranks: RankPool, tmp_path: Path) -> None:
    """Four processes, then two, then four: each step has the samples that it has in a run that nobody disturbed."""
    job = Job(str(tmp_path / "whole"), samples=48, arguments=SAVING | {"max_steps": 9})
    whole = ranks.run(run_fold3d, 4, job, FOLDED)[0]

    def go_on(processes: int, layout: dict[str, Any], source: str, checkpoint: str) -> Outcome:
        folder = tmp_path / f"from {checkpoint}"
        shutil.copytree(tmp_path / source / checkpoint, folder / checkpoint)
        auto = replace(job, folder=str(folder), arguments=job.arguments | {"resume": "auto"})
        return ranks.run(run_fold3d, processes, auto, layout)[0]

    two = go_on(2, {"pp": 2}, "whole", STEP)
    assert_continues(two, replace(whole, metrics=two.metrics), 1e-12)
    four = go_on(4, FOLDED, f"from {STEP}", "checkpoint-6")
    assert_continues(four, replace(whole, metrics=four.metrics), 1e-12)


def test_it_begins_anew_where_there_is_nothing(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "new"), arguments={"resume": "auto", "max_steps": 2})
    assert run_fold3d(job, {}).column("step") == [1, 2, 2]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("more", [{"max_steps": 3}, {"num_train_epochs": 2, "save_strategy": "epoch"}])
def test_what_is_done_is_not_trained_again(tmp_path: Path, more: dict[str, Any]) -> None:
    """No step is left: the same command ends with the same weights, to which an update was still to come."""
    arguments = SAVING | {"max_steps": -1, "resume": "auto"} | more
    job = Job(str(tmp_path), samples=16, arguments=arguments)
    done, again = (run_fold3d(job, {"segments": 2, "gradient_delay": 1}) for _ in range(2))
    assert again.column("step")[-1] == done.column("step")[-1]
    assert all(torch.equal(weight, done.weights[name]) for name, weight in again.weights.items())


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    class Full(Variant):
        def trainer(self, base: type[Any]) -> type[Any]:
            class Trainer(base):  # type: ignore[misc]
                def training_step(self, *args: Any, **named: Any) -> Any:
                    raise AssertionError("a step has begun")

            return Trainer

    error = OSError(30, "Read-only file system", str(tmp_path))
    with (
        mock.patch("fold3d.trainer.saving.tempfile.TemporaryFile", side_effect=error),
        pytest.raises(OSError, match="Read-only"),
    ):
        run_fold3d(Job(str(tmp_path), variant=Full(), arguments=SAVING), {})


class BetterLater(Watched):
    """The best step is 3, of which there is a checkpoint; while that is being written step 4 is better."""

    def trainer(self, base: type[Any]) -> type[Any]:
        watched = super().trainer(base)

        class Scored(watched):  # type: ignore[misc]
            def evaluate(self, *args: Any, **named: Any) -> Any:
                return super().evaluate(*args, **named) | {
                    "eval_score": {3: 2.0, 4: 1.0}.get(self.state.global_step, 9)
                }

        return Scored

    def after(self, trainer: Any) -> Any:
        return trainer.state.best_model_checkpoint


def test_the_best_step_of_then_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    """None was known: the best step by the time at which a checkpoint was complete had none."""
    watched = BetterLater()
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "score", "greater_is_better": False}
    arguments = ASYNC | best | {"max_steps": 7, "gradient_accumulation_steps": 1}
    job = Job(str(tmp_path), samples=40, variant=watched, arguments=arguments)
    with mock.patch("fold3d.checkpoint.delivery.write_all", watched.write):
        found = run_fold3d(job, {})
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert found.extra == str(tmp_path / "checkpoint-3")
    assert all(torch.equal(found.weights[name], value) for name, value in saved.items())
