"""describe_machine(): what a result depends on besides the code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT = 30.0


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
