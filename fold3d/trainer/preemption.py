"""PreemptionCallback: a signal on one rank asks all of them to save after the same step, and to end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from fold3d.errors import Fold3dError

MARK = "preempted.json"
_FILLING = f"{MARK}.tmp"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm, SkyPilot, Kubernetes and torchrun send the first; `sbatch --signal` any of them."""
_TORCHRUN_SECONDS = 30.0
"""From the SIGTERM that torchrun hands on until it kills, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise."""


class EvaluationEndedError(Fold3dError):
    """The job has been asked to end in the middle of an evaluation; raised on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempted:
    """What a job's script is told when the training was asked to end: as JSON in `preempted.json`, in output_dir."""

    step: int
    """Optimizer steps that are done in the checkpoint."""
    checkpoint: str
    """Folder of it in output_dir, complete."""
    seconds: float
    """From the first signal until the checkpoint was complete."""
    tokens_done: int | None
    """Input tokens of the steps so far, padding too, at the mean of this run; None where batches have none."""
    tokens_left: int | None
    """Of the steps that are left."""

    def write(self, folder: Path) -> None:
        """Leaves the mark; one process calls it. Raises: OSError."""
        (folder / _FILLING).write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(folder / _FILLING, folder / MARK)


def remove_mark(folder: Path) -> None:
    """Takes the mark away, whole or not."""
    for path in (folder / MARK, folder / _FILLING):
        if path.exists():  # a folder that cannot be written to may have none
            path.unlink(missing_ok=True)


class PreemptionCallback(JITCheckpointCallback):
    """Takes the place of the stock callback of `enable_jit_checkpoint`, and waits for nothing when a signal comes.

    A signal reaches processes at different moments, or only one of them, but all of them write a checkpoint. So it is
    only noted here; the Trainer's processes hear of it with what else they tell each other at the end of a step.
    """

    trainer: Any
    jit_manager: Any

    def __init__(self, stock: JITCheckpointCallback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trainer, self.jit_manager = stock.trainer, stock.jit_manager
        self.asked_at: float | None = None
        """When a signal came, by `time.monotonic`."""
        self.asked_by = 0
        """Its number."""
        self._before: dict[signal.Signals, Any] = {}
        if self.jit_manager is not None:
            self._take_signals()

    def _take_signals(self) -> None:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not None:  # else it was taken by something that is not Python
                self._before[number] = before
                signal.signal(number, self._note)
        if self.jit_manager._original_sigterm_handler is not None:  # what the stock callback has found
            self._before[signal.SIGTERM] = self.jit_manager._original_sigterm_handler

    def _note(self, number: int, frame: Any) -> None:
        if self.asked_at is None:
            self.asked_at, self.asked_by = time.monotonic(), number
        self.jit_manager.is_checkpoint_requested = True

    @property
    def is_asked(self) -> bool:
        """Whether this process has been asked to end."""
        return self.jit_manager is not None and self.jit_manager.is_checkpoint_requested

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Takes the signals, which an earlier training may have given back."""
        if self.jit_manager is not None and not self._before:
            self._take_signals()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Ends an evaluation of the training when a rank has been asked; all ranks are here."""
        if self.jit_manager is not None:
            self.trainer.end_evaluation_if_asked()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Nothing: the other ranks do not know of the signal yet."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Nothing: the other ranks do not know of the signal yet."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Nothing: all ranks are about to hear of it."""

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Nothing: all ranks are about to hear of it."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Gives the signals back to whoever had them."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        if self.jit_manager is not None:
            self.jit_manager.is_checkpoint_requested, self.asked_at = False, None


def without_waiting(callback: TrainerCallback) -> TrainerCallback:
    """Returns `callback`, or what takes its place."""
    return PreemptionCallback(callback) if type(callback) is JITCheckpointCallback else callback


def is_asked_to_end(callbacks: Iterable[TrainerCallback]) -> bool:
    """Whether a signal has asked this process to end."""
    return any(one.is_asked for one in callbacks if isinstance(one, PreemptionCallback))


def time_left(callbacks: Iterable[TrainerCallback], grace: float | None) -> tuple[float, float]:
    """Returns the seconds since the first signal on this rank, 0.0 where none came, and those that are left until the
    process is killed, infinity where nobody says when.

    Args:
        grace: what the user says: seconds from the signal.
    """
    asked = [one for one in callbacks if isinstance(one, PreemptionCallback) and one.asked_at is not None]
    if not asked:
        return 0.0, float("inf")
    first = min(asked, key=lambda one: one.asked_at or 0.0)
    seconds = time.monotonic() - (first.asked_at or 0.0)
    found = _grace(first.asked_by, os.environ, time.time() - seconds) if grace is None else grace
    return seconds, found - seconds


def _grace(number: int, environment: Mapping[str, str], asked_at: float) -> float:
    """Returns the seconds from the signal, at `asked_at` of the clock, until torchrun kills, or Slurm's time is up."""
    limits = [float("inf")]
    if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in environment:
        limits.append(float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_SECONDS)))
    if environment.get("SLURM_JOB_END_TIME", "").isdecimal():
        limits.append(float(environment["SLURM_JOB_END_TIME"]) - asked_at)
    return min(limits)
