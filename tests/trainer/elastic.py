"""A training under torchrun of which a host is lost, and comes back.

    FOLD3D_TEST_HOST=0 torchrun ... -m tests.trainer.elastic FOLDER SETTINGS

Two launchers on this machine are the hosts, of two processes each. At step `LOST` the second one dies with its
processes. The first goes on alone until step `BACK`, where it waits for torchrun to ask it to end, since the second has
come back. Each process notes the losses of its steps in FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import transformers

import fold3d
from fold3d.trainer.preemption import is_asked_to_end
from tests.trainer.jobs import Job, stock_arguments, trainer_arguments

LOST, BACK, STEPS = 4, 8, 12
PATIENCE_S = 300.0
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}


class Hosts(transformers.TrainerCallback):  # type: ignore[misc]
    """Loses a host, once, and waits for it, once."""

    reads_gradients = False

    def __init__(self, folder: Path, host: int) -> None:
        self.folder, self.host, self.launcher = folder, host, os.getppid()
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The second host is gone: its launcher and its processes, each of which comes by here."""
        if state.global_step == LOST and self.host == 1 and not (self.folder / "whole").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.launcher, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The host that is left waits for the other."""
        if state.global_step == BACK and args.world_size == 2:
            (self.folder / "alone").touch()
            deadline = time.monotonic() + PATIENCE_S
            while not is_asked_to_end(self.trainer.callback_handler.callbacks):
                if time.monotonic() > deadline:
                    raise TimeoutError("the other host has not come back")
                time.sleep(0.05)


def main(folder: Path, settings: dict[str, Any]) -> None:
    """What each process runs."""
    job = Job(str(folder / "out"), samples=48, dropout=0.1)
    auto = {"resume": "auto", "enable_jit_checkpoint": True, "exit_when_preempted": True, "comm_timeout": 60.0}
    args = fold3d.TrainingArguments(**stock_arguments(job) | SAVING | auto | settings)
    hosts = Hosts(folder, int(os.environ["FOLD3D_TEST_HOST"]))

    class Trainer(fold3d.Trainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            if float(loss):
                line = {"step": self.state.global_step + 1, "world": args.world_size, "loss": float(loss)}
                line["replica"] = self.engine.topology.dp_rank
                with open(folder / f"losses-{os.getpid()}.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
            return loss

    trainer = Trainer(args=args, callbacks=[hosts], **trainer_arguments(job))
    hosts.trainer = trainer
    trainer.train()
    trainer.end()


def losses(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """Returns by step the ranks and the loss, the mean over the replicas, of each training that made it."""
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    for path in folder.glob("losses-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            of_replica = found.setdefault((line["step"], line["world"]), {}).setdefault(line["replica"], [])
            of_replica.append(line["loss"])
    merged: dict[int, list[tuple[int, float]]] = {}
    for (step, world), replicas in found.items():
        assert all(max(some) - min(some) < 1e-12 for some in replicas.values()), (step, world, replicas)
        mean = sum(some[0] for some in replicas.values()) / len(replicas)
        merged.setdefault(step, []).append((world, mean))
    return merged


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
