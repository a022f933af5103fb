"""Ranks that are killed, stopped or end in an uncaught exception, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dist import failure_jobs
from tests.helpers.launch import ROOT, LaunchResult, RankExit, launch

pytestmark = pytest.mark.dist

SCRIPT = Path(failure_jobs.__file__)
DIAGNOSIS = 3.0
"""Seconds a rank looks around for who failed."""
EXIT = 12.0
"""Seconds until the interpreter has ended, on a machine whose cores are busy."""
START = 240.0
"""Seconds until the launcher gives a job up. Most of them go before the trap springs: four processes import torch and
build their engines, on a machine whose cores are busy. What follows the trap has the limits above."""


@dataclass
class Ended:
    """A job in which a trap sprang."""

    result: LaunchResult
    seconds: list[float]
    """From the trap to the end of each rank."""

    def check(self, failed: int, limit: float, *texts: str) -> list[RankExit]:
        """Asserts what must hold for every living rank; returns them."""
        living = [one for rank, one in enumerate(self.result) if rank != failed]
        for rank, one in enumerate(self.result):
            if rank == failed:
                continue
            assert one.returncode not in (0, -signal.SIGKILL) and not one.timed_out, self.result.report()
            for text in texts:
                assert text in one.stderr, self.result.report()
            assert self.seconds[rank] < limit, (self.seconds, self.result.report())
        assert not self.result.orphans, self.result.orphans
        return living


def run(layout: dict[str, Any], trap: dict[str, Any], *, script: bool, program: Path = SCRIPT) -> Ended:
    """Trains until the trap springs. `script`: rank 0 keeps the job's store, as without torchrun; by `program` then."""
    processes = layout.get("dp", 1) * layout.get("pp", 1)
    start = time.monotonic()
    if script:
        result = launch(program, processes, repr(layout), repr(trap), timeout=START)
    else:
        result = launch(failure_jobs.train, processes, layout, trap, timeout=START)
    lines = [line for one in result for line in one.stdout.splitlines() if line.startswith("trap ")]
    assert len(lines) == 1, result.report()
    sprang = float(lines[0].split()[1]) - start
    return Ended(result, [one.seconds - sprang for one in result])


def test_ends_well_without_close() -> None:
    result = launch(SCRIPT, 2, repr({"pp": 2}), repr({"rank": -1, "place": ""}), timeout=START)
    assert [one.returncode for one in result] == [0, 0] and not result.orphans, result.report()
    assert [one.stdout for one in result] == ["done\n"] * 2, result.report()


def test_torchrun() -> None:
    """The launcher returns non-zero in bounded time and leaves nothing running."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command += [repr({"pp": 2}), repr({"rank": 1, "place": "forward", "what": "SIGKILL"})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as launcher:
        try:
            out, err = launcher.communicate(timeout=START)
        finally:
            left = _session(launcher.pid)
            for process in left:
                os.kill(process, signal.SIGKILL)
    assert launcher.returncode == 1 and not left, err
    lines = [line for line in out.splitlines() if line.startswith("trap ")]
    assert len(lines) == 1 and time.monotonic() - float(lines[0].split()[1]) < DIAGNOSIS + EXIT, out
    assert "Signal 9" in err, err


def _session(leader: int) -> list[int]:
    """Returns the processes that live in the session of `leader`, children of its own sessions included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session == leader or (str(SCRIPT).encode() in command and int(entry.name) != os.getpid()):
                found.append(int(entry.name))
    return found
