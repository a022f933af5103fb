"""A training as a user would write it, for tests: its layout follows from the GPUs that it was given.

Usage: torchrun ... train.py OUTPUT. Process 0 appends a line `step loss layout` to losses.txt for each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tests.trainer.jobs import Job, Variant, run_fold3d

LAYOUTS = {"a100": {"pp": 2}, "t4": {"dp": 2}}
SAMPLES = 8
"""Of a step."""


class Losses(Variant):
    """Sums the losses of a step over micro-batches and replicas, in double precision, and writes them down. The logs
    have them in single precision, as transformers' own loss.
    """

    def __init__(self, path: Path | None, layout: str, last: int | None = None) -> None:
        self.path, self.layout, self.last = path, layout, last
        self.lines: list[tuple[int, float]] = []
        self.total = torch.zeros((), dtype=torch.float64)

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """Returns a micro-batch's part of the loss of a step. Ranks that have the last stage run it."""
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
        self.total += loss.detach()
        return loss

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"compute_loss_func": self.loss}

    def trainer(self, base: type[Any]) -> type[Any]:
        told = self

        class Notes(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if dist.is_initialized():
                    dist.all_reduce(told.total)
                told.lines.append((state.global_step, float(told.total)))
                if told.path is not None and state.is_world_process_zero:
                    with told.path.open("a") as file:
                        file.write(f"{state.global_step} {float(told.total)!r} {told.layout}\n")
                told.total.zero_()
                if state.global_step == told.last:
                    control.should_training_stop = True

        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                self.add_callback(Notes())

        return Trainer


def job(output: Path, losses: Losses, replicas: int) -> Job:
    """Returns the training: the same samples in each step, whatever the number of replicas."""
    arguments = {
        "max_steps": 10**5,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": SAMPLES // 2 // replicas,
        "enable_jit_checkpoint": True,
        "save_strategy": "steps",
        "save_steps": 10**5,
    }
    return Job(str(output), samples=40, variant=losses, arguments=arguments)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    kind = os.environ["FOLD3D_KIND"]
    chosen = LAYOUTS[kind]
    made = job(place, Losses(place / "losses.txt", kind), chosen.get("dp", 1))
    made.arguments |= {"resume": "auto", "exit_when_preempted": True}
    run_fold3d(made, chosen)
