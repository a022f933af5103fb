"""What a callback wants of the training loop on one process, all processes do after the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job
from tests.trainer.user_jobs import build, messages

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Sets(transformers.TrainerCallback):  # type: ignore[misc]
    """Sets a flag in an event, on some processes, after some steps."""

    reads_gradients = False

    def __init__(self, event: str, flag: str, ranks: list[int], step: int = 2) -> None:
        self.flag, self.ranks, self.step = flag, ranks, step
        setattr(self, event, self._set)
        self.seen: list[tuple[str, int]] = []

    def _set(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if args.process_index in self.ranks and state.global_step == self.step:
            setattr(control, self.flag, True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(("log", state.global_step))


class SetsAtSteps(Sets):
    """Implements the events of a step, so that its wishes are compared within it."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """As in `Sets`, whose instances have their own."""


def train(job: Job, layout: dict[str, Any], callback: Sets) -> tuple[int, list[tuple[str, int]], list[str]]:
    """Returns the number of steps, what happened after which step, and what fold3d told."""
    trainer = build(job, layout)
    trainer.add_callback(callback)
    texts = messages("fold3d.trainer", trainer.train)
    steps = trainer.state.global_step
    trainer.engine.close()
    return steps, callback.seen, [text for text in texts if "has set" in text]


def job_of(folder: Path, **arguments: Any) -> Job:
    return Job(str(folder), layers=2, arguments={"logging_strategy": "no", "ddp_timeout": 60} | arguments)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_all_processes_stop(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """One waited for ddp_timeout, and the others' error named the comparison of their memory."""
    for rank, found in enumerate(
        ranks.run(train, 2, job_of(tmp_path), layout, Sets("on_step_end", "should_training_stop", [0]))
    ):
        steps, _, texts = found
        assert steps == 2
        assert [text[: text.index(":")] for text in texts] == (
            ["a callback has set should_training_stop on process 0 and not on process 1, at step 2"]
            if rank == 0
            else []
        )


@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_in_the_events_behind_a_step(ranks: RankPool, tmp_path: Path, flag: str, event: str) -> None:
    """As where both processes set it."""
    job = job_of(tmp_path, **({"logging_strategy": "steps", "logging_steps": 2} if event == "on_log" else {}))
    both = ranks.run(train, 2, job, {"dp": 2}, Sets(event, flag, [0, 1]))[0]
    for who in ([0], [1]):
        for steps, seen, _ in ranks.run(train, 2, job, {"dp": 2}, Sets(event, flag, who)):
            assert (steps, seen) == both[:2]
    assert both[0] == (2 if "training" in flag else 4)
    assert flag == "should_log" or "stop" in flag or (flag.removeprefix("should_"), 2) in both[1]


@pytest.mark.parametrize("kind", [SetsAtSteps, Sets])
@pytest.mark.parametrize("event", ["on_epoch_begin", "on_step_begin", "on_substep_end", "on_evaluate", "on_save"])
def test_a_stop_in_the_other_events(ranks: RankPool, tmp_path: Path, event: str, kind: type[Sets]) -> None:
    """Within a step the loop ends before its gradients are used, as in the stock Trainer, where the callback's class
    says that it acts there; else the step is done by all."""
    named = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    job = job_of(tmp_path, **(named if event in ("on_evaluate", "on_save") else {}))
    step = 0 if event == "on_epoch_begin" else 2
    found = [
        ranks.run(train, 2, job, {"dp": 2}, kind(event, "should_training_stop", who, step))
        for who in ([0, 1], [0], [1])
    ]
    both = found[0][0][:2]
    for outcomes in found:
        assert [outcome[:2] for outcome in outcomes] == [both] * 2
    late = kind is Sets and event in ("on_step_begin", "on_substep_end", "on_epoch_begin")
    expected = 0 if event == "on_epoch_begin" else 2
    assert both[0] == expected + (late and event != "on_epoch_begin")
