"""Ctrl-C: every rank ends soon and with one line, wherever it is; what a script catches, it catches."""

from __future__ import annotations

import signal
import time

import pytest

from fold3d.faults.uncaught import INTERRUPTED
from tests.dist import failure_jobs
from tests.helpers.launch import LaunchResult, launch

EXIT = 12.0
"""Seconds from Ctrl-C to the end of a process on a machine whose cores are busy; a second or two where they are not."""


def run(place: str, what: str, rank: int) -> tuple[LaunchResult, list[float], list[list[str]]]:
    """Trains on 4 processes until somebody presses Ctrl-C.

    Returns: how the ranks ended, after how many seconds, and what each wrote of it.
    """
    start = time.monotonic()
    layout = {"dp": 2, "pp": 2, "segments": 2, "comm_timeout": 60.0}
    trap = {"rank": rank, "place": place, "what": what}
    result = launch(failure_jobs.train, 4, layout, trap, timeout=100.0)
    pressed = min(float(line.split()[1]) for one in result for line in one.stdout.splitlines() if "trap " in line)
    said = [[line for line in one.stderr.splitlines() if "fold3d" in line or "Error" in line] for one in result]
    for one in result:
        assert "Traceback" not in one.stderr and not one.timed_out, result.report()
    assert not result.orphans, result.orphans
    return result, [one.seconds - (pressed - start) for one in result], said


@pytest.mark.dist
def test_ctrl_c_ends_all_ranks_that_wait_for_one() -> None:
    """As from a terminal: all get it. Rank 2 computes for long, the others are in waits of C++.

    Whose signal comes late, on a busy machine, has heard from another rank by then.
    """
    result, seconds, said = run("forward", "Ctrl-C", 2)
    assert result[2].returncode == -signal.SIGINT, result.report()
    assert {one.returncode for one in result} <= {-signal.SIGINT, 1}, result.report()
    assert all(len(lines) == 1 and INTERRUPTED in lines[0] for lines in said), result.report()
    assert max(seconds) < failure_jobs.PRESSED_AFTER + EXIT, seconds


@pytest.mark.dist
@pytest.mark.parametrize("place", ["backward", "optimizer"])
def test_ctrl_c_on_one_rank_ends_the_others_with_its_name(place: str) -> None:
    result, seconds, said = run(place, "SIGINT", 3)
    assert [one.returncode for one in result] == [1, 1, 1, -signal.SIGINT], result.report()
    assert all(len(lines) == 1 for lines in said), result.report()
    assert all(f" stops: rank 3 (replica 1, stage 1) {INTERRUPTED} in " in lines[0] for lines in said[:3]), said
    assert said[3] == [f"fold3d: rank 3 (replica 1, stage 1) {INTERRUPTED}"]
    assert max(seconds) < EXIT, seconds
