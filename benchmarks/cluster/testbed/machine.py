"""What a result depends on besides the code: describe_machine(), describe_commit(), wait_for_calm()."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.cluster.results.progress import say

ROOT = Path(__file__).resolve().parents[3]
GIT_TIMEOUT = 30.0
MAX_STOLEN = 0.03
"""Of the time for which the cores had work. Where the machine's host took more it is not calm: at 4 to 9 % the steps of
systems with many passes become 4 to 8 % longer, those of others hardly."""
WAIT_S = 30.0
"""The longest wait for calm."""
_LOOK_S = 0.5
_PAUSE_S = 2.0


def describe_machine() -> dict[str, Any]:
    """Returns processor, cores, load, kernel and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "torch": metadata.version("torch"),
    }


def core_ticks() -> tuple[int, int]:
    """Returns the ticks of this machine's cores since boot: those with work to do, and of them those that its host gave
    to others (0 on a physical machine)."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(ticks) for ticks in line.split()[1:9])
    return user + nice + system + irq + softirq + steal, steal


def stolen_now() -> float:
    """Returns the share of its cores' time that the machine's host takes; all of them work for half a second."""
    cores = len(os.sched_getaffinity(0))
    busy_before, stolen_before = core_ticks()
    end = time.monotonic() + _LOOK_S
    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(_work_until, [end] * cores))
    busy, stolen = core_ticks()
    return (stolen - stolen_before) / max(1, busy - busy_before)


def wait_for_calm(look: Callable[[], float] = stolen_now, pause_s: float = _PAUSE_S, most_s: float = WAIT_S) -> bool:
    """Waits until the machine's host leaves the cores alone; returns whether it does before `most_s` are over."""
    end = time.monotonic() + most_s
    told = False
    while (share := look()) > MAX_STOLEN:
        if time.monotonic() >= end:
            return False
        if not told:
            say(f"this machine's host takes {share:.0%} of the cores: waiting for up to {most_s:.0f} s")
            told = True
        time.sleep(pause_s)
    return True


def _work_until(end: float) -> None:
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)  # without the GIL


def describe_commit() -> dict[str, Any]:
    """Returns the commit, and whether files differ from it."""
    return {"commit": _git("rev-parse", "HEAD"), "changed_files": len(_git("status", "--porcelain").splitlines())}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=GIT_TIMEOUT)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
