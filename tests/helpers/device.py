"""Where the ranks of tests train: FOLD3D_TEST_DEVICE=cpu, sim (the simulated device of simdevice/) or cuda.

For the parity grid above all: what it asks of layouts it asks of all devices. Processes of `ranks` and `ranks8` see the
device then, and an engine takes it unless told otherwise; the reference of one process stays on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping

from tests.helpers.call import changed_environment

VARIABLE = "FOLD3D_TEST_DEVICE"
DEVICES = ("cpu", "sim", "cuda")


def chosen(environment: Mapping[str, str] = os.environ) -> str:
    """Returns which of DEVICES. Raises: ValueError for another."""
    text = environment.get(VARIABLE, "cpu")
    if text not in DEVICES:
        raise ValueError(f"{VARIABLE}={text!r}: must be one of {', '.join(DEVICES)}")
    return text


def register() -> None:
    """Called in a process that serves tests: makes the chosen device known to torch."""
    if chosen() == "sim":
        importlib.import_module("simdevice.sim")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Around what a rank trains. On the simulated device a race is an error where it happens; at the end none may be
    left, and something must have run there. A Trainer of one process takes it from the environment (docs/gpu.md)."""
    if chosen() != "sim":
        yield
        return
    from simdevice import sim

    sim.take_reports()
    before = sim.launches()
    with changed_environment({"ACCELERATE_TORCH_DEVICE": "sim:0"} if os.environ["WORLD_SIZE"] == "1" else {}):
        yield
    reports = sim.take_reports()
    assert not reports, reports
    assert sim.launches() - before > 100, "it did not run on the device"
