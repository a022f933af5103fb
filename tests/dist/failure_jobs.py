"""What the ranks run in the failure tests: a small training in which one of them does something bad somewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import RankError

TIMEOUT = 4.0
"""comm_timeout of the jobs, seconds."""
PRESSED_AFTER = 1.0
"""Seconds from the beginning of the step until all ranks get Ctrl-C."""
BLOCKS = 8
MICRO_BATCHES = 4


def say(line: str) -> None:
    """Writes a line for the test to read; this process may not live to flush it later."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass
class Trap:
    """Springs once: on `rank`, at `place` of step `step` (from 1), the second time it is reached where it is often.

    `what`: "raise", "sleep", the name of a signal, or "Ctrl-C": it sleeps, and all ranks get SIGINT meanwhile.
    """

    rank: int
    place: str
    what: str = "raise"
    step: int = 2
    visits: int = 0
    now: int = 0
    sprang: float = 0.0

    def visit(self, place: str) -> None:
        """Called at every place of every rank."""
        if place != self.place or dist.get_rank() != self.rank or self.now != self.step:
            return
        self.visits += 1
        if self.visits != (1 if place in ("optimizer", "stepped", "outside", "evaluation") else 2):
            return
        self.sprang = time.monotonic()
        say(f"trap {self.sprang}")
        if self.what == "raise":
            raise ZeroDivisionError(f"broken in {place}")
        if self.what in ("sleep", "Ctrl-C"):
            time.sleep(2 * TIMEOUT)
        else:
            os.kill(os.getpid(), getattr(signal, self.what))


trap = Trap(rank=-1, place="")


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        trap.visit("backward")
        return gradient


class Block(nn.Module):
    """A layer with a trap in its forward and in its backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        trap.visit("forward" if torch.is_grad_enabled() else "evaluation")
        out: Tensor = _Watched.apply(torch.tanh(self.linear(x)))
        return out


class Net(nn.Module):
    """A chain of blocks; returns the mean square error."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


class Adam(torch.optim.Adam):
    """Adam with a trap in its step."""

    def step(self, *args: Any, **named: Any) -> Any:
        trap.visit("optimizer")
        return super().step(*args, **named)


def _hook(parameter: Tensor) -> None:
    trap.visit("hook")


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    value: Tensor = model(**batch) / MICRO_BATCHES
    trap.visit("loss")
    return value


def engine_of(layout: dict[str, Any], *, width: int = 16) -> tuple[Engine, dict[str, Tensor]]:
    """Returns an engine and this replica's batch, where it computes."""
    torch.manual_seed(0)
    settings = {"segments": 1, "micro_batches": MICRO_BATCHES, "comm_timeout": TIMEOUT, "blocks": "layers"}
    config = ParallelConfig(**settings | layout)  # type: ignore[arg-type]
    x = torch.randn(config.micro_batches, 2, width)
    batch = {"x": x.flatten(0, 1), "y": x.flatten(0, 1).roll(1, 0)}
    engine = Engine(Net(width), config, optimizer=Adam, max_grad_norm=1.0, example=batch)
    return engine, {name: tensor.to(engine.device) for name, tensor in batch.items()}


def train(
    layout: dict[str, Any], trap_settings: dict[str, Any], steps: int = 3, width: int = 16, lazy: bool = False
) -> None:
    """Runs `steps` steps, then an evaluation; leaves the engine open, as scripts do.

    Args:
        lazy: no evaluation, so that nothing but the next step waits for the weights that a step leaves on their way.
    """
    global trap
    trap = Trap(**trap_settings)
    if trap.what in ("SIGINT", "Ctrl-C"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    engine, batch = engine_of(layout, width=width)
    for parameter in engine.owned.values():
        parameter.register_post_accumulate_grad_hook(_hook)
    for step in range(1, steps + 1):
        trap.now = step
        if trap.what == "Ctrl-C" and step == trap.step:
            threading.Timer(PRESSED_AFTER, os.kill, (os.getpid(), signal.SIGINT)).start()
        trap.visit("outside")
        if trap.place == "loss":
            engine.run([{name: t[i::MICRO_BATCHES] for name, t in batch.items()} for i in range(MICRO_BATCHES)], _loss)
            engine.clip_grad_norm(1.0)
            engine.optimizer.step()  # type: ignore[union-attr]
        else:
            engine.step(batch)
        trap.visit("stepped")
        if not lazy:
            engine.evaluate(batch)
    say("done")


def outcome(layout: dict[str, Any], trap_settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Trains; returns the error that ended it, when that was and when the trap sprang (0 where it did not)."""
    answer = {"error": "", "cause": ""}
    try:
        train(layout, trap_settings, **options)
    except RankError as error:
        answer = {"error": str(error), "cause": type(error.__cause__).__name__}
    return answer | {"ended": time.monotonic(), "sprang": trap.sprang}


def main() -> None:
    """As a script: LAYOUT and TRAP as Python literals; the group comes from the environment, as torchrun sets it."""
    import ast

    dist.init_process_group("gloo")
    train(ast.literal_eval(sys.argv[1]), ast.literal_eval(sys.argv[2]))


if __name__ == "__main__":
    main()
