"""A pool of rank processes, forked from a server that has imported torch, which serve many tests.

    def share(value):                      # at the top of a test module
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_share(ranks):                 # fixture of conftest.py: four workers, started on first use
        assert ranks.run(share, 2, 10) == [21, 21]

Each call gets a fresh gloo group over a file and the environment torchrun would set. A rank that raises fails
the test with its traceback; so does one that hangs or dies, with the stacks of those that hang, and the pool
starts anew. A rank that is done keeps its groups until all are: one that took them down earlier would cut the
connections that gloo is still making on a slower rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers import call, device
from tests.helpers.cuda import HIDDEN, SEEN

START_TIMEOUT_S = 180.0
"""Importing torch on a machine whose cores are all busy is slow."""
GRACE_S = 10.0
"""How long the other ranks may take to notice that one has failed."""
PRELOADED = "tests.helpers.preloaded"
LEAVE = "leave"
"""Tells a rank whose function has returned to take its process groups down."""
DIED = "the process died"


class RankError(AssertionError):
    """A rank raised, hung or died; the message holds the first traceback, `failures` a text per rank."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection


class RankPool:
    """`size` worker processes, started on first use; `run` uses the first `world_size`. Not thread-safe.

    With `cuda` they see the machine's CUDA devices, and engines take that of their local rank; else none, unless the
    tests' device is another (`tests.helpers.device`).
    """

    def __init__(self, size: int, *, cuda: bool = False) -> None:
        self.size = size
        self._sees_cuda = cuda or device.chosen() == "cuda"
        self._environment = {"OMP_NUM_THREADS": "1"} | (SEEN if self._sees_cuda else HIDDEN)
        self.starts = 0
        self._calls = 0
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    def run(
        self,
        target: str | Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        grace: float = GRACE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Returns what `target(*args, **kwargs)` returned on each of `world_size` ranks.

        Args:
            target: function at the top of a module, or "module:function".
            args, kwargs: the same for every rank; anything that pickles.
            timeout: seconds for the whole call, and the time limit of the default process group.
            grace: seconds the other ranks have to end by themselves once one rank has failed.
        Raises:
            RankError: with the first traceback, or the stacks of the ranks that hang.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size} does not fit a pool of {self.size}; the fixture ranks8 has 8")
        ref = call.reference(target)
        self._start()
        assert self._folder is not None
        # Importing a test module may import transformers, which takes long on a busy machine: not the call's time.
        self._ask(range(world_size), (ref, 0, "", 0, 0.0, (), {}))
        self._collect(world_size, time.monotonic() + START_TIMEOUT_S, grace, f"importing {ref}")
        self._calls += 1
        store = str(self._folder / f"store-{self._calls}")
        self._ask(range(world_size), (ref, world_size, store, call.free_port(), timeout, args, kwargs))
        results = self._collect(world_size, time.monotonic() + timeout, grace, ref, holds=True)
        self._ask(range(world_size), LEAVE)
        self._collect(world_size, time.monotonic() + timeout, grace, f"ending the groups of {ref}")
        return results

    def _ask(self, ranks: Iterable[int], request: Any) -> None:
        message = pickle.dumps(request)
        for rank in ranks:
            self._workers[rank].pipe.send_bytes(message)

    def close(self) -> None:
        """Kills the workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        if self._workers:
            return
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="fold3d-ranks-"))
        context = _context(self._sees_cuda)
        with call.changed_environment(self._environment):
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, str(self._folder), dict(os.environ))
                process = context.Process(target=_serve, args=arguments, name=f"rank{rank}", daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        self._collect(self.size, time.monotonic() + START_TIMEOUT_S, GRACE_S, "starting the workers")

    def _collect(self, world_size: int, deadline: float, grace: float, what: str, *, holds: bool = False) -> list[Any]:
        """Receives one answer per rank; raises on any failure, and kills the pool if a rank hangs or is dead.

        Args:
            holds: a rank with a good answer waits for LEAVE; on any failure all of them get it.
        """
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        leaving: set[int] = set()
        waiting = {self._workers[rank].pipe: rank for rank in range(world_size)}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                good, value = self._receive(rank)
                if not good:
                    failures[rank] = value
                elif rank not in leaving:
                    results[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + grace)
                grace = max(0.0, deadline - time.monotonic())
                done = [rank for rank in results if holds and rank not in leaving]
                self._ask(done, LEAVE)
                leaving.update(done)
                waiting |= {self._workers[rank].pipe: rank for rank in done}
        if not waiting and not failures:
            return [results[rank] for rank in range(world_size)]
        dead = any(text.startswith(DIED) for text in failures.values())
        for rank in sorted(waiting.values()):
            failures[rank] = "did not come back; its threads:\n" + self._stacks(rank)
        if waiting or dead:
            self.close()
        first, *others = failures.items()
        message = f"{what}, world size {world_size}: rank {first[0]}: {first[1]}"
        for rank, text in others:
            message += f"\nand rank {rank}: " + (text if text.startswith("did not") else text.strip().splitlines()[-1])
        raise RankError(message, failures)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """Returns whether the rank did what it was asked, and its result or what went wrong."""
        try:
            good, value = pickle.loads(self._workers[rank].pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._workers[rank].process.join(1.0)
            return False, f"{DIED}, exit code {self._workers[rank].process.exitcode}\n"
        return good, value

    def _stacks(self, rank: int) -> str:
        """Returns the Python stacks of a worker that hangs, even in a blocked C++ call (faulthandler)."""
        assert self._folder is not None
        process = self._workers[rank].process
        if process.pid is None or not process.is_alive():
            return f"none, it is dead (exit code {process.exitcode})"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        written = self._folder / f"stacks-{rank}"  # by a worker that has come so far
        text = written.read_text() if written.exists() else ""
        return text or "none was written: it is stopped or not yet running"


def _context(sees_cuda: bool) -> Any:
    """Returns what starts processes. Importing torch and transformers takes some six seconds of a core, so a server
    does it once and forks; but CUDA does not survive a fork once anything has asked how many devices there are."""
    if sees_cuda:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def _serve(pipe: Connection, rank: int, folder: str, environment: dict[str, str]) -> None:
    """Body of a worker process: answers requests until the pipe closes."""
    call.die_with_parent()
    os.environ.clear()  # the server's
    os.environ.update(environment)
    stacks = open(os.path.join(folder, f"stacks-{rank}"), "w")  # noqa: SIM115  lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _preload()
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        _send(pipe, _answer(pipe, request, rank))


def _send(pipe: Connection, answer: bytes) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(answer)


def _preload() -> None:
    importlib.import_module(PRELOADED)
    device.register()
    call.clean_slate()
    call.freeze_imports()


def _answer(pipe: Connection, request: bytes, rank: int) -> bytes:
    """Runs one request; returns the last of its pickled answers, (good, result or traceback).

    A function that returned has its result sent at once; what is left to answer, when all ranks are done, is whether
    its groups could be taken down.
    """
    try:
        ref, world_size, store, port, timeout, args, kwargs = pickle.loads(request)
        function = call.resolve(ref)
        call.freeze_imports()
        if world_size == 0:  # only the import was asked for
            return pickle.dumps((True, None))
        with (
            call.changed_environment(call.rank_environment(rank, world_size, port)),
            call.process_group(store, rank, world_size, timeout),
        ):
            _send(pipe, pickle.dumps((True, function(*args, **kwargs))))
            pipe.recv_bytes()  # LEAVE
        return pickle.dumps((True, None))
    except BaseException:  # the worker outlives whatever a test does, SystemExit included
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        call.clean_slate()
