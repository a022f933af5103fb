"""run_ranks(): the processes of one run, started together and never left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.05
TAIL_CHARACTERS = 3000


class RanksFailed(RuntimeError):
    """A rank failed, or the run took too long; the text has the rank's last output."""


def run_ranks(commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path, timeout: float) -> None:
    """Runs one process per command until all have ended well; kills the others when one fails.

    Args:
        commands: of rank 0, 1, ...
        environment: the whole environment of each.
        folder: takes the output of each rank.
        timeout: seconds until the run counts as failed.
    Raises: RanksFailed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            with open(folder / f"output{rank}.txt", "wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        _wait(processes, folder, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code is not None and code != 0:
                raise RanksFailed(f"rank {rank} ended with {code}:\n{_tail(folder, rank)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = next(rank for rank, code in enumerate(codes) if code is None)
            raise RanksFailed(
                f"not done after {timeout:.0f} s; raise --timeout if the machine is busy. Rank {late} last wrote:\n"
                + _tail(folder, late)
            )
        time.sleep(POLL_S)


def worker_command(job: Path, rank: int) -> list[str]:
    """Returns the command of one rank."""
    return [sys.executable, "-m", "benchmarks.cluster.worker", str(job), str(rank)]


def _tail(folder: Path, rank: int) -> str:
    return (folder / f"output{rank}.txt").read_text(errors="replace")[-TAIL_CHARACTERS:] or "(nothing)"
