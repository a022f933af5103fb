"""What a rank of the campaign runs: a small training with evaluation and saving, in which one rank has a fault."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.gpt2 import modeling_gpt2

import fold3d
from tests.faults.cases import ALL, AT_ONCE, ENDS_A_STEP, EVENTS, PLACES, RANDOM, Case
from tests.helpers import models
from tests.trainer.jobs import collate, rows

STEP = 4
"""The fault comes in the step after so many, or in what belongs to that many; one before makes checkpoint 2."""
STEPS = 6
SHORT, LONG = 5.0, 60.0
"""comm_timeout in seconds: where a silent rank must be noticed, and elsewhere, on a machine whose cores are busy."""
SLOW = 100_000
"""Bytes a second on a connection that is slow."""
NAP = 1.5
"""Seconds of what goes on."""


class Trap:
    """Springs once, on one rank at one moment."""

    def __init__(self, case: Case | None, rank: int, mark: Path) -> None:
        """`mark` is written when it springs."""
        self._case, self._mark = case if case is not None and case.rank in (rank, ALL) else None, mark
        self.moment = "" if case is None else case.moment
        self.step = -1
        self.sprang = False
        self._began = 0.0

    def visit(self, moment: str) -> float:
        """Called wherever a rank comes by; returns what a gradient is multiplied by."""
        case = self._case
        if case is None or moment != case.moment or self.sprang:
            return 1.0
        if moment not in AT_ONCE and self.step != STEP:
            return 1.0
        self.sprang = True
        return self._spring(case.kind, moment)

    def begin(self, step: int, steps: int) -> None:
        """A step begins; at a random moment the case happens that says so."""
        lasted, self._began = time.monotonic() - self._began, time.monotonic()
        case = self._case
        if case is None or not case.moment.startswith(RANDOM):
            return
        chance = random.Random(case.moment)
        if step == chance.randrange(steps - 1):
            delay = chance.random() * (lasted if step else 1.0)
            threading.Timer(delay, self._spring, (case.kind, case.moment)).start()

    def _spring(self, kind: str, moment: str) -> float:
        self._mark.write_text(f"{time.monotonic()}")
        if kind == "raise":
            raise ZeroDivisionError(f"broken in {moment}")
        if kind == "NaN":
            return float("nan")
        actions: dict[str, Callable[[], Any]] = {
            "out of memory": lambda: torch.empty(1 << 60, dtype=torch.uint8),
            "exit": lambda: sys.exit(3),
            "pause": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "slow": lambda: time.sleep(NAP),
            "hang": lambda: time.sleep(4 * SHORT),
            "busy": lambda: ctypes.PyDLL(None).sleep(round(2 * SHORT)),
            "fork": _fork,
            "clock jump": _jump,
            "link down": _cut_links,
            "link slow": _slow_links,
            "message corrupted": _corrupt_links,
            "store dead": _end_store,
            "read-only folder": lambda: _may_not_write(self._mark.parent / "out"),
            "full disk": lambda: mock.patch("shutil.disk_usage", return_value=mock.Mock(free=0)).start(),
            "file limit": _limit_files,
            "blocked folder": lambda: (self._mark.parent / f"out/tmp-checkpoint-{STEP}").write_text(""),
            "worker killed": _kill_worker,
        }
        if kind in actions:
            actions[kind]()
        else:
            os.kill(os.getpid(), getattr(signal, kind))
        return 1.0


def _fork() -> None:
    """User code that forks; the child ends at once, without what a Python process does at its end."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _jump() -> None:
    """The wall clock goes an hour back."""
    real = time.time
    mock.patch("time.time", side_effect=lambda: real() - 3600.0).start()


def _sockets() -> Iterator[socket.socket]:
    """Yields the TCP connections of this process, and the sockets that it listens at."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as link:
                    if link.family in (socket.AF_INET, socket.AF_INET6):
                        yield link


def _links() -> Iterator[socket.socket]:
    """Yields those of them that lead to other ranks, but not by the job's store."""
    for link in _sockets():
        with contextlib.suppress(OSError):
            ports = link.getpeername()[1], link.getsockname()[1]  # raises for one that listens
            if int(os.environ["MASTER_PORT"]) not in ports:
                yield link


def _cut_links() -> None:
    """Every TCP connection of this process breaks."""
    for link in _sockets():
        with contextlib.suppress(OSError):
            link.getpeername()  # raises for one that listens
            link.shutdown(socket.SHUT_RDWR)


def _slow_links() -> None:
    """Connections of this process send so many bytes a second from now on."""
    so_max_pacing_rate = 47
    for link in _links():
        link.setsockopt(socket.SOL_SOCKET, so_max_pacing_rate, SLOW)


def _corrupt_links() -> None:
    """Each connection of this process has some bytes that nobody has sent."""
    for link in _links():
        with contextlib.suppress(OSError):
            link.setblocking(False)
            link.send(bytes(range(1, 48)))


def _end_store() -> None:
    """The job's store, which this process keeps, hears nobody any more."""
    for link in _sockets():
        with contextlib.suppress(OSError):
            if link.getsockname()[1] == int(os.environ["MASTER_PORT"]):
                link.shutdown(socket.SHUT_RDWR)


def _may_not_write(folder: Path) -> None:
    """This process may not write into the folder any more, nor into others of the user who started it."""
    folder.chmod(0o555)
    if os.geteuid() == 0:  # who may write into any folder
        os.seteuid(65534)


def _limit_files() -> None:
    """No file of this process may grow beyond some bytes."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def _kill_worker() -> None:
    children = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
    for child in children.stdout.split():
        os.kill(int(child), signal.SIGKILL)


def _come_by(
    trap: Trap,
    owner: Any,
    name: str,
    moment: Callable[[tuple[Any, ...]], str],
    after: Callable[[Any], None] = lambda result: None,
) -> None:
    """Lets `trap` know of each call of a function or method, and `after` of what it returns."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        trap.visit(moment(args))
        result = original(*args, **named)
        after(result)
        return result

    setattr(owner, name, call)


def _set_traps(trap: Trap) -> None:
    def forward(args: tuple[Any, ...]) -> str:
        if isinstance(args[1], FakeTensor) or args[1].is_meta:
            return ""
        return "forward" if torch.is_grad_enabled() else "evaluation"

    def watch_backward(result: Any) -> None:
        if not isinstance(result, FakeTensor) and result.requires_grad:
            result.register_hook(lambda gradient: gradient * trap.visit("backward"))

    _come_by(trap, modeling_gpt2.GPT2MLP, "forward", forward, after=watch_backward)
    for moment, places in PLACES.items():
        for place in places:
            owner, _, name = place.rpartition(".")
            came = _writing if moment == "writing" else lambda _, moment=moment: moment
            _come_by(trap, pkgutil.resolve_name(owner), name, came)


def _writing(args: tuple[Any, ...]) -> str:
    """A thread that writes may run when the next step has begun: the folder tells which checkpoint it is."""
    return "writing" if f"checkpoint-{STEP}" in str(args[0]) else ""


class Visits(transformers.TrainerCallback):  # type: ignore[misc]
    """Knows the step, and is code of the user's at the events of a training."""

    reads_gradients = False

    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trap.begin(state.global_step, state.max_steps)
        self.trap.step = state.global_step + (1 if self.trap.moment in ENDS_A_STEP else 0)
        if self.trap.moment == "barrier" and self.trap.step == STEP:
            self.trap.visit("barrier")
            dist.barrier()  # a collective of the user's, which nothing can interrupt

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trap.visit("update")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trap.visit("gather")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trap.visit("callback")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trap.visit("end")


def _coming_by(event: str) -> Callable[..., None]:
    return lambda self, *_, **__: self.trap.visit(event) and None


for _event in EVENTS:
    setattr(Visits, _event, _coming_by(_event))


def train(folder: str, case: Case | None, layout: dict[str, Any], timeout: float) -> None:
    """Trains in `folder`/out, from the newest checkpoint there; called on every rank as a script calls it."""
    transformers.utils.logging.set_verbosity_error()
    rank = int(os.environ["RANK"])
    trap = Trap(case, rank, Path(folder) / "sprang")
    _set_traps(trap)
    trap.visit("import")
    kills_worker = case is not None and case.kind == "worker killed"
    named: dict[str, Any] = {
        "output_dir": f"{folder}/out",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": STEP,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 11,
        "resume": "auto",
        "enable_jit_checkpoint": True,
        "exit_when_preempted": True,
        "comm_timeout": timeout,
        "ddp_timeout": int(2 * LONG),
        "dataloader_num_workers": int(kills_worker),
        "segments": 1,
    }
    args = fold3d.TrainingArguments(**named | layout)
    model = models.build(models.gpt2_config(layers=4, dropout=0.1), dtype=torch.float64)

    def collated(samples: Any) -> Any:
        trap.visit("data")
        return collate(samples)

    trainer = fold3d.Trainer(
        model=model,
        args=args,
        train_dataset=rows(40),
        eval_dataset=rows(8, seed=4),
        data_collator=collate if kills_worker else collated,
        callbacks=[Visits(trap)],
    )
    if kills_worker:
        _come_by(trap, trainer, "training_step", lambda _: "data")
    trainer.train()
    trainer.end()
