"""peak_bytes(): the most memory this process has needed so far."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int:
    """Returns the most bytes that torch's allocator had given out on a GPU; for the CPU the process's peak resident
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():  # what getrusage says on Linux includes the process that started this one
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
