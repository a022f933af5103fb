"""What the ranks run when one of them vanishes while the Trainer saves or evaluates, or in a foreign collective."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from tests.dist.failure_jobs import TIMEOUT, engine_of, say
from tests.trainer.jobs import Job, Variant, run_fold3d

SAVE_STEPS = 2


class Vanishes(Variant):
    """Rank 1 sends itself a signal in its second save, or in the evaluation after the second step."""

    def __init__(self, name: str, place: str) -> None:
        self.name, self.place = name, place

    def trainer(self, base: type[Any]) -> type[Any]:
        name, place = self.name, self.place

        def spring(trainer: Any, here: str) -> None:
            if here == place and trainer.state.global_step == 2 * SAVE_STEPS and dist.get_rank() == 1:
                say(f"trap {time.monotonic()}")
                os.kill(os.getpid(), getattr(signal, name))

        class Trainer(base):  # type: ignore[misc]
            def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
                spring(self, "saving")
                super()._save_optimizer_and_scheduler(output_dir)

            def prediction_step(self, *args: Any, **named: Any) -> Any:
                result = super().prediction_step(*args, **named)
                spring(self, "evaluating")
                return result

        return Trainer


def train(folder: str, layout: dict[str, Any], name: str, place: str) -> None:
    """Trains with a checkpoint and an evaluation every other step until the trap springs."""
    arguments = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "eval_steps": SAVE_STEPS,
        "max_steps": 6,
    }
    job = Job(folder, samples=40, arguments=arguments, variant=Vanishes(name, place))
    run_fold3d(job, layout | {"comm_timeout": TIMEOUT})


def wait_in_a_foreign_collective(layout: dict[str, Any]) -> None:
    """Rank 1 stops while the others wait in a group of their own, whose time limit is far away."""
    engine, batch = engine_of(layout)
    engine.step(batch)
    if dist.get_rank() == 1:
        say(f"trap {time.monotonic()}")
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
