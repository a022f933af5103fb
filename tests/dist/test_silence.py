"""A rank that is stopped at any moment from its arguments to a save is named by all others; one that is busy is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import silence_jobs
from tests.dist.silence_jobs import MOMENTS
from tests.helpers.launch import LaunchResult, launch

pytestmark = pytest.mark.dist

LIMIT = 300.0
"""Seconds until the launcher gives a job up, less than those that ranks wait for each other without a watch (1800)."""


def run(folder: Path, rank: int, moment: str, how: str) -> LaunchResult:
    result = launch(Path(silence_jobs.__file__), 4, str(folder), str(rank), moment, how, timeout=LIMIT)
    assert "trap " in result[rank].stdout, result.report()
    return result


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_is_stopped_is_named(moment: str, tmp_path: Path) -> None:
    silent = 0 if moment == "planning" else 1  # rank 0 alone plans; it also keeps the job's store
    result = run(tmp_path, silent, moment, "stopped")
    for rank, one in enumerate(result):
        if rank != silent:
            assert one.returncode > 0 and not one.timed_out, result.report()
            assert f"rank {silent} (replica 0, stage {silent})" in one.stderr and "stopped" in one.stderr, one.stderr
    assert result[silent].stopped and not result.orphans, result.report()


def test_a_rank_that_is_busy_is_waited_for(tmp_path: Path) -> None:
    """Longer than it might be silent, in one call that lets no other thread of Python run."""
    result = run(tmp_path, 1, "building the model", "busy")
    assert [one.returncode for one in result] == [0] * 4, result.report()
