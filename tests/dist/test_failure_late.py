"""comm_timeout limits what a rank waits for others: a backward may take longer; a replica that never comes is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.late_jobs import COMPUTE, HANG, LIMIT, RUN, SKEW, train
from tests.helpers.ranks import RankPool

DIAGNOSIS = 3.0
"""Seconds a rank looks around for who failed."""
PROMPT = 4.0
"""Seconds for the news, on a machine whose cores are busy; all in all less than HANG."""
NAME = "rank 1 (replica 1, stage 0) does not come in time (setting comm_timeout): it is in "


def check_that_it_goes_on(found: list[dict[str, Any]]) -> None:
    """Of a job in which each replica computed for longer than comm_timeout."""
    for one in found:
        assert one["error"] == "" and one["distance"] < 1e-12, found
        assert one["seconds"] > COMPUTE, found


def check_that_it_is_named(found: list[dict[str, Any]], computed: float) -> None:
    """Of two replicas, the second of which never came, while the first computed for so many seconds."""
    for one in found:
        assert one["error"].startswith(NAME), found
    assert computed + LIMIT <= found[0]["seconds"] < computed + LIMIT + DIAGNOSIS + PROMPT, found


@pytest.mark.parametrize("dp_sync", ["zero1", "early"])
def test_a_backward_that_takes_longer_than_the_limit_is_no_failure(ranks: RankPool, dp_sync: str) -> None:
    check_that_it_goes_on(ranks.run(train, 2, [COMPUTE, COMPUTE + SKEW], dp=2, dp_sync=dp_sync, timeout=RUN))


@pytest.mark.parametrize("computed", [0.0, COMPUTE], ids=["at once", "after computing for longer than the limit"])
def test_a_replica_that_hangs_is_named_within_the_limit(ranks: RankPool, computed: float) -> None:
    found = ranks.run(train, 2, [computed, computed + HANG], dp=2, dp_sync="zero1", timeout=RUN)
    check_that_it_is_named(found, computed)
