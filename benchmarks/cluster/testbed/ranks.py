"""Ranks: processes that are started together, asked together, and never left behind."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL_CHARACTERS = 3000
READ_BYTES = 1 << 16
END_S = 5.0
"""How long a rank that has closed its answers may take to end."""


class RanksFailed(RuntimeError):
    """A rank failed, or an answer took too long; the text has the rank's last output."""


class Ranks:
    """One process per command; a context manager that kills what is left at its end.

    Each reads requests, a line of JSON each, from its standard input and answers with a line of JSON on its standard
    output; what it writes to standard error is kept for error messages.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path):
        """Args:
        commands: of rank 0, 1, ...
        environment: the whole environment of each.
        folder: takes what each rank writes to standard error.
        """
        self._commands = commands
        self._environment = environment
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Ranks:
        try:
            for rank, command in enumerate(self._commands):
                with open(self._folder / f"output{rank}.txt", "wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            command,
                            env=self._environment,
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=output,
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def ask(self, request: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Sends one request to every rank and returns their answers in order of ranks.

        Args:
            timeout: seconds for all of it.
        Raises: RanksFailed when a rank ends, however it ends, or does not answer in time; no request may follow then.
        """
        line = json.dumps(request).encode() + b"\n"
        deadline = time.monotonic() + timeout
        answers = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdin is not None and process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
                try:
                    os.write(process.stdin.fileno(), line)
                except BrokenPipeError:
                    self._fail_ended(rank)
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    self._fail_late(min(key.data for key in selector.get_map().values()), timeout)
                for key, _ in events:
                    piece = os.read(key.fd, READ_BYTES)
                    if not piece:
                        self._fail_ended(key.data)
                    answers[key.data] += piece
                    if piece.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(answer) for answer in answers]

    def _fail_ended(self, rank: int) -> None:
        try:
            code: object = self._processes[rank].wait(END_S)
        except subprocess.TimeoutExpired:
            code = "its answers closed"
        raise RanksFailed(f"rank {rank} ended with {code}:\n{self._tail(rank)}")

    def _fail_late(self, rank: int, timeout: float) -> None:
        raise RanksFailed(
            f"no answer after {timeout:.0f} s; raise --timeout if the machine is busy. Rank {rank} last wrote:\n"
            + self._tail(rank)
        )

    def _tail(self, rank: int) -> str:
        return (self._folder / f"output{rank}.txt").read_text(errors="replace")[-TAIL_CHARACTERS:] or "(nothing)"


def worker_command(rank: int, world: int, device: str) -> list[str]:
    """Returns the command of one rank of a job of `world` ranks.

    Args:
        device: "sim": systems may compute on the simulated device; "cpu": none does.
    """
    return [sys.executable, "-m", "benchmarks.cluster.on_rank.worker", *map(str, (rank, world, os.getpid(), device))]
