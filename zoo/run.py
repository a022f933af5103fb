"""run(): judges cases, each in a process of its own that has a time limit, so that none can end the others."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection

import torch

from zoo.cases import Case
from zoo.verdict import CRASHED, Verdict, judge

_MEMORY = 8 << 30
"""Of address space, beyond what the process begins with."""


def run(
    cases: Sequence[Case], seconds: float = 90.0, judging: Callable[[Case], Verdict] = judge
) -> Iterator[tuple[Case, Verdict]]:
    """Yields each case with its verdict, `judge`'s or that of `judging`. Slower ones than `seconds`, and those whose
    process dies, have crashed."""
    import torch._dynamo  # noqa: F401  (else each process would import it for itself)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    fork = multiprocessing.get_context("fork")  # what was imported is there at once
    for case in cases:
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(case, there, judging), daemon=True)
        process.start()
        there.close()
        try:
            verdict = here.recv() if here.poll(seconds) else Verdict(CRASHED, f"not done after {seconds:g} s")
        except EOFError:
            process.join()
            verdict = Verdict(CRASHED, f"its process ended with {_ending(process.exitcode)}")
        if process.is_alive():
            process.kill()
        process.join()
        here.close()
        yield case, verdict


def progress(done: int, cases: int, name: str) -> None:
    """Draws a bar on a terminal; prints nothing elsewhere."""
    if sys.stderr.isatty():
        filled = 30 * done // max(1, cases)
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{cases} {name:<50.50}")
        sys.stderr.flush()


def _child(case: Case, answer: Connection, judging: Callable[[Case], Verdict]) -> None:
    _limit_memory()
    torch.set_num_threads(1)  # tiny models are no faster with more, and far slower on a busy machine
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        answer.send(judging(case))


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
