"""Fresh rank processes for one call: for tests that kill, stop or crash them, and for whole scripts.

result = launch(train_then_die, 4, timeout=60)      # function at the top of a module, or the path of a script
assert result[2].returncode == -signal.SIGKILL
assert "rank 2" in result[0].stderr and result[0].seconds < 30 and not result.orphans
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import call

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    returncode: int
    """As subprocess says it: negative = killed by that signal (also when the launcher had to)."""
    stdout: str
    stderr: str
    seconds: float
    """From the start of the job to the end of this process."""
    stopped: bool
    """It was stopped (SIGSTOP) when all others had ended, and was killed by the launcher."""
    timed_out: bool
    """It still ran at the timeout and was killed by the launcher."""


class LaunchResult(list[RankExit]):
    """One `RankExit` per rank. `orphans`: command lines of processes the ranks left behind (killed since)."""

    def __init__(self, ranks: Sequence[RankExit], orphans: Sequence[str]) -> None:
        super().__init__(ranks)
        self.orphans = list(orphans)

    def report(self) -> str:
        """Returns everything the ranks wrote, for an assertion message."""
        return "\n".join(
            f"--- rank {rank}: exit {one.returncode} after {one.seconds:.1f} s\n{one.stdout}{one.stderr}"
            for rank, one in enumerate(self)
        )


def launch(
    target: str | Path | Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Runs `target` in `world_size` fresh processes, each a session of its own, and waits for their end.

    Args:
        target: a function at the top of a module (or "module:function"), called with `args` in a gloo group;
            or the path of a Python script, which gets `args` as its command line and makes its own group from
            the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT ... as torchrun sets them).
        args: for a function anything JSON can hold; for a script strings.
        timeout: seconds until every process of every rank is killed.
        env: further environment variables.
    Ends early when only stopped processes (SIGSTOP) are left. Never leaves a process behind.
    """
    script = isinstance(target, Path) or (isinstance(target, str) and target.endswith(".py"))
    what = str(target) if script else call.reference(target)  # type: ignore[arg-type]
    port = call.free_port()
    with tempfile.TemporaryDirectory(prefix="fold3d-launch-") as folder:
        request = json.dumps({"target": what, "script": script, "args": args, "timeout": timeout, "folder": folder})
        command = [sys.executable, "-m", "tests.helpers.launch", request]
        start = time.monotonic()
        processes = []
        for rank in range(world_size):
            environment = os.environ | call.rank_environment(rank, world_size, port)
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
            environment |= env or {}
            with open(f"{folder}/{rank}.out", "wb") as out, open(f"{folder}/{rank}.err", "wb") as err:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=err, cwd=ROOT, start_new_session=True)
                )
        try:
            ends, stopped = _wait(processes, start + timeout)
        finally:
            orphans = [line for p in processes if p.poll() is not None for line in _session(p.pid).values()]
            for process in processes:
                _kill_session(process)
        ranks = [
            RankExit(
                returncode=process.returncode,
                stdout=Path(f"{folder}/{rank}.out").read_text(errors="replace"),
                stderr=Path(f"{folder}/{rank}.err").read_text(errors="replace"),
                seconds=ends.get(rank, time.monotonic()) - start,
                stopped=rank in stopped,
                timed_out=rank not in ends and rank not in stopped,
            )
            for rank, process in enumerate(processes)
        ]
    return LaunchResult(ranks, orphans)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> tuple[dict[int, float], set[int]]:
    """Returns when each rank ended, and the ranks that are stopped and will never end."""
    ends: dict[int, float] = {}
    while time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ends and process.poll() is not None:
                ends[rank] = time.monotonic()
        left = {rank for rank in range(len(processes)) if rank not in ends}
        if not left or all(_state(processes[rank].pid) == "T" for rank in left):
            return ends, left
        time.sleep(POLL_S)
    return ends, set()


def _stat(pid: int | str) -> list[str]:
    """Returns the fields of /proc/PID/stat after the command name, or [] for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _session(leader: int) -> dict[int, str]:
    """Returns pid -> command line of what lives in the session that `leader` started, without itself."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == leader:
            continue
        fields = _stat(entry.name)
        if fields and fields[0] != "Z" and int(fields[3]) == leader:
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    for pid in [*_session(process.pid), *([process.pid] if process.poll() is None else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _main() -> None:
    """Body of a rank: `python -m tests.helpers.launch REQUEST`."""
    request = json.loads(sys.argv[1])
    call.die_with_parent()
    if request["script"]:
        sys.argv = [request["target"], *request["args"]]
        runpy.run_path(request["target"], run_name="__main__")
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with call.process_group(f"{request['folder']}/store", rank, world_size, request["timeout"]):
        call.resolve(request["target"])(*request["args"])


if __name__ == "__main__":
    _main()
