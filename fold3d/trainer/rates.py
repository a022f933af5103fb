"""RatesCallback: what a job measures on the GPUs that it has, for `fold3d cluster` to decide with."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median, pstdev
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from fold3d.cluster.rates import NOISE, Measured, Measurement

FILE = "rates.json"
_LOGS = 64
"""The newest of which the median is taken."""


class RatesCallback(TrainerCallback):
    """Writes `rates.json` into `output_dir` at each log and save: tokens per second on these GPUs, tokens done and
    left, seconds of a save and of a start. `fold3d cluster` and `fold3d cost` read it.

    Give it to the Trainer in `callbacks`, on every process; process 0 writes. Rates that earlier runs measured on other
    GPUs stay in the file. The first log of a run does not count, because it includes the start.

    Args:
        kind: name of the kind of GPU, as in `fold3d cluster` and the file of prices. None: the kind on which
            `fold3d cluster` started the job (FOLD3D_KIND), otherwise the device's own name.

    Raises: ConfigError, when training begins, for a `rates.json` that is no such file.
    """

    def __init__(self, kind: str | None = None) -> None:
        self._kind = kind or os.environ.get("FOLD3D_KIND") or _device_name()
        self._gpus = int(os.environ.get("FOLD3D_GPUS", 0))
        self._rates: list[float] = []
        self._logs = 0
        self._tokens = self._seconds = 0.0
        self._steps = self._counted = 0
        self._last_event = time.perf_counter()
        self._measured = Measured()
        self._began = float(os.environ.get("FOLD3D_STARTED", time.time()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reads what is there. Raises: ConfigError for a file that is no such file."""
        self._measured = Measured.read(Path(args.output_dir) / FILE)
        self._last_event = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first one is the end of the start."""
        now = time.perf_counter()
        if self._began:
            self._measured = replace(self._measured, start_seconds=time.time() - self._began)
            self._began = 0.0
        self._seconds += now - self._last_event  # with the loading of its batches, as the rate has it
        self._steps += 1
        self._last_event = now

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What follows is a save."""
        self._last_event = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written since the last event."""
        self._measured = replace(self._measured, save_seconds=time.perf_counter() - self._last_event)
        self._write(args, state)
        self._last_event = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Takes the rate, if it is a training's log."""
        self._last_event = time.perf_counter()
        if not logs or "tokens_per_second" not in logs:
            return
        rate, self._logs = float(logs["tokens_per_second"]), self._logs + 1
        if self._logs > 1 and rate > 0:
            self._rates = [*self._rates, rate][-_LOGS:]
            self._tokens, self._counted = self._tokens + rate * self._seconds, self._counted + self._steps
            self._write(args, state)
        self._seconds, self._steps = 0.0, 0

    def _write(self, args: Any, state: Any) -> None:
        if not state.is_world_process_zero or not self._rates:
            return
        middle = median(self._rates)
        error = max(NOISE, pstdev(self._rates) / middle / len(self._rates) ** 0.5)
        gpus = self._gpus or (dist.get_world_size() if dist.is_initialized() else 1)
        layout = " ".join(f"{axis}{getattr(args, axis, None) or 1}" for axis in ("dp", "tp", "pp"))
        self._measured = self._measured.with_rate(Measurement(self._kind, gpus, middle, error, layout))
        of_step = self._tokens / self._counted
        left = max(0, state.max_steps - state.global_step)
        self._measured = replace(self._measured, done=state.global_step * of_step, left=left * of_step)
        self._measured.write(Path(args.output_dir) / FILE)


def _device_name() -> str:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
