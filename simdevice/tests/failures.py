"""The jobs of tests/dist/failure_jobs.py on the simulated device; as a script, as that one."""

from __future__ import annotations

from typing import Any

from simdevice import sim  # noqa: F401  the device becomes torch's accelerator
from tests.dist import failure_jobs


def train(layout: dict[str, Any], trap: dict[str, Any]) -> None:
    """As `failure_jobs.train`."""
    failure_jobs.train(layout, trap)


if __name__ == "__main__":
    failure_jobs.main()
