"""What the ranks run of which one falls silent: a Trainer's script from import to save, and where it may stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any
from unittest import mock

TIMEOUT = 6.0
"""comm_timeout of the jobs, seconds."""

PLACES = {
    "connecting the ranks": "fold3d.engine.engine.WorldGroup",
    "recording": "fold3d.engine.planning.cut_model.record",
    "measuring layers": "fold3d.engine.planning.planner.profile_of",
    "measuring links": "fold3d.profile.network.measure_network",
    "planning": "fold3d.engine.planning.planner._check_memory",
    "cutting": "fold3d.engine.planning.cut_model.RankModel",
    "connecting the engine": "fold3d.engine.builder.connect_replicas",
    "building the engine": "fold3d.engine.builder.Pipeline",
}
"""What fold3d calls at a moment -> its name where it is called."""
MOMENTS = ("building the model", *PLACES, "the first step", "a later step", "evaluation", "saving")


def spring(how: str) -> None:
    """This rank is "stopped"; or it is "busy": it holds the GIL for twice as long as a rank may be silent."""
    sys.stdout.write(f"trap {time.monotonic()}\n")
    sys.stdout.flush()
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        ctypes.PyDLL(None).sleep(round(2 * TIMEOUT))  # a call of C, which lets no other thread of Python run


def main(folder: str, rank: str, moment: str, how: str, timeout: str = str(TIMEOUT)) -> None:
    """Trains, evaluates and saves, until the trap springs on `rank` at `moment`."""
    chosen = moment if os.environ["RANK"] == rank else ""

    def reach(place: str, step: int = 0) -> None:
        if place == chosen and step in (0, 2):
            spring(how)

    reach("importing")
    import fold3d
    from tests.trainer.jobs import Job, model_of, stock_arguments, trainer_arguments

    class Trainer(fold3d.Trainer):
        def training_step(self, *args: Any, **named: Any) -> Any:
            reach("the first step" if self.state.global_step == 0 else "a later step", self.state.global_step)
            return super().training_step(*args, **named)

        def prediction_step(self, *args: Any, **named: Any) -> Any:
            reach("evaluation")
            return super().prediction_step(*args, **named)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            reach("saving")
            super()._save_optimizer_and_scheduler(output_dir)

    settings = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 6}
    job = Job(folder, samples=40, arguments=settings | {"dataloader_pin_memory": False})
    args = fold3d.TrainingArguments(**stock_arguments(job), dp=2, pp=2, comm_timeout=float(timeout))
    reach("building the model")
    named = trainer_arguments(job) | {"model": model_of(job), "args": args}
    if chosen in PLACES:
        module, _, name = PLACES[chosen].rpartition(".")
        original = getattr(sys.modules[module], name)

        def trapped(*args: Any, **named: Any) -> Any:
            reach(chosen)
            return original(*args, **named)

        mock.patch(PLACES[chosen], trapped).start()
    Trainer(**named).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
