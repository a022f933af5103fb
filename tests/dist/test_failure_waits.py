"""Waits that fold3d does not control: in a save, in the stock loop's gathers, in the user's own collectives."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist import failure_trainer
from tests.dist.failure_jobs import TIMEOUT
from tests.helpers.launch import LaunchResult, launch

pytestmark = pytest.mark.dist

GRACE = 5.0
"""Seconds a rank may stay in a call that cannot be interrupted."""
DIAGNOSIS = 3.0
EXIT = 12.0


def run(target: Any, processes: int, *args: Any) -> tuple[LaunchResult, float]:
    """Returns how the job ended, and the seconds from the trap to the end of the last living rank."""
    start = time.monotonic()
    result = launch(target, processes, *args, timeout=120)
    lines = [line for one in result for line in one.stdout.splitlines() if line.startswith("trap ")]
    assert len(lines) == 1, result.report()
    last = max(one.seconds for rank, one in enumerate(result) if rank != 1)
    assert not result.orphans and not any(one.timed_out for one in result), result.report()
    return result, start + last - float(lines[0].split()[1])


@pytest.mark.parametrize(
    "name, place, layout",
    [
        ("SIGSTOP", "saving", {"pp": 2}),
        ("SIGKILL", "saving", {"pp": 2}),
        ("SIGSTOP", "evaluating", {"dp": 2}),
    ],
)
def test_the_trainer(tmp_path: Path, name: str, place: str, layout: dict[str, Any]) -> None:
    result, seconds = run(failure_trainer.train, 2, str(tmp_path), layout, name, place)
    living = result[0]
    assert living.returncode == 1, result.report()
    coordinates = "replica 1, stage 0" if "dp" in layout else "replica 0, stage 1"
    assert f"rank 1 ({coordinates})" in living.stderr, result.report()
    assert " stops: " in living.stderr or "ends its process. The job has failed" in living.stderr, result.report()
    if place == "saving" and name == "SIGKILL":
        assert "Noticed by rank 0 (replica 0, stage 0) in saving " in living.stderr, result.report()
    assert seconds < (TIMEOUT if name == "SIGSTOP" else 0) + DIAGNOSIS + GRACE + EXIT, result.report()
    assert result[1].stopped if name == "SIGSTOP" else result[1].returncode == -signal.SIGKILL
    complete = {path.name for path in tmp_path.iterdir() if not path.name.startswith("tmp-")}
    assert complete <= {"checkpoint-2", "runs"} | ({"checkpoint-4"} if place == "evaluating" else set()), complete
    assert "checkpoint-2" in complete


def test_a_foreign_collective() -> None:
    """Nothing can interrupt it: the process says why and ends."""
    result, seconds = run(failure_trainer.wait_in_a_foreign_collective, 2, {"pp": 2})
    assert result[0].returncode == 1 and result[1].stopped, result.report()
    assert seconds < TIMEOUT + GRACE + EXIT, result.report()
    for text in (
        "rank 0 (replica 0, stage 0) ends its process",
        "rank 1 (replica 0, stage 1) has given no sign",
        "barr",
    ):
        assert text in result[0].stderr, result.report()
