"""CUDA devices: hidden from the test process and its CPU ranks, which must not claim them; seen by `cuda` tests."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from tests.helpers import call

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_given = os.environ.get(_VARIABLE)
HIDDEN: dict[str, str | None] = {_VARIABLE: ""}
SEEN: dict[str, str | None] = {_VARIABLE: _given}
"""What a process that shall see the devices has in its environment."""


def hide() -> None:
    """Hides the devices from this process and those it starts; called before torch is imported.

    An engine takes the GPU where there is one, and most tests want the CPU's.
    """
    os.environ[_VARIABLE] = ""


@functools.cache
def device_count() -> int:
    """Returns how many devices there are, as a process that may see them says."""
    import torch

    if torch.version.cuda is None:
        return 0
    with call.changed_environment(SEEN):
        command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout)
