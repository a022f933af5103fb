"""CUDA devices: hidden from the test process and its CPU ranks, which must not claim them; seen by `cuda` tests."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.helpers import call

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_KEPT = "FOLD3D_TEST_CUDA_VISIBLE_DEVICES"
"""The variable as it was given, for xdist's workers: they inherit an environment in which it hides the devices."""
_ALL = "all"
"""What stands there where it was not set."""
_given = os.environ.get(_KEPT, os.environ.get(_VARIABLE, _ALL))
HIDDEN: dict[str, str | None] = {_VARIABLE: ""}
SEEN: dict[str, str | None] = {_VARIABLE: None if _given == _ALL else _given}
"""What a process that shall see the devices has in its environment."""


def hide() -> None:
    """Hides the devices from this process and those it starts; called before torch is imported.

    An engine takes the GPU where there is one, and most tests want the CPU's.
    """
    os.environ[_KEPT] = _given
    os.environ[_VARIABLE] = ""


def skip_unless_served(ranks: int) -> None:
    """Skips the test where there are fewer devices than ranks.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and later) ranks may share a device: slow, since they take turns on
    it, but every path of the runtime is run.
    """
    found = device_count()
    shared = found > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if found < ranks and not shared:
        pytest.skip(f"{found} CUDA devices, the test needs {ranks} (ranks share one: NCCL_MULTI_RANK_GPU_ENABLE=1)")


@functools.cache
def device_count() -> int:
    """Returns how many devices there are, as a process that may see them says."""
    import torch

    if torch.version.cuda is None:
        return 0
    with call.changed_environment(SEEN):
        command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout)
