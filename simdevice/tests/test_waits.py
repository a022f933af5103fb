"""The limit for a sum, comm_timeout, is one for the others: it does not count what this rank's own device computes."""

from __future__ import annotations

import pytest

from tests.dist import late_jobs as late
from tests.dist.test_failure_late import check_that_it_goes_on, check_that_it_is_named
from tests.helpers.ranks import RankPool

WAITS = "simdevice.tests.waits"
LIMIT = 0.5
"""As there; what pytest's own process runs must not import it."""
COMPUTE = 1.5


@pytest.mark.parametrize("makes_room", [True, False], ids=["slices", "launched at once"])
def test_a_backward_that_takes_longer_than_the_limit_is_no_failure(makes_room: bool, sim_ranks: RankPool) -> None:
    for seconds in sim_ranks.run(f"{WAITS}:compute_for_long", 2, makes_room=makes_room, timeout=60.0):
        assert COMPUTE < seconds < 30


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("makes_room", [True, False], ids=["slices", "launched at once"])
def test_gathers_come_behind_sums_that_nobody_waited_for(makes_room: bool, rounded: bool, sim_ranks: RankPool) -> None:
    """With late gradients they read what had not arrived."""
    sim_ranks.run(f"{WAITS}:gather_sums", 2, makes_room=makes_room, rounded=rounded, timeout=60.0)


@pytest.mark.parametrize("computes", [True, False], ids=["computes", "never comes"])
@pytest.mark.parametrize("makes_room", [True, False], ids=["slices", "launched at once"])
def test_who_waits_for_another_replica_says_so_within_the_limit(
    makes_room: bool, computes: bool, sim_ranks: RankPool
) -> None:
    found = sim_ranks.run(f"{WAITS}:wait_for_one", 2, makes_room=makes_room, computes=computes, timeout=60.0)
    text, seconds = found[0]
    for part in (
        "replica 0: ",
        "reduce of bucket 0 (step 1)",
        "0.500 s (setting comm_timeout)",
        "replica 1 of the stage",
    ):
        assert part in text, text
    assert LIMIT <= seconds < LIMIT + 3 * COMPUTE


def test_training_goes_on_after_a_long_backward(sim_ranks: RankPool) -> None:
    seconds = [late.COMPUTE, late.COMPUTE + late.SKEW]
    check_that_it_goes_on(sim_ranks.run(f"{WAITS}:train", 2, seconds, dp=2, dp_sync="zero1", timeout=late.RUN))


@pytest.mark.parametrize(
    ("hangs", "computed"),
    [("host", 0.0), ("device", late.COMPUTE)],
    ids=["a host, at once", "a device, after computing for longer than the limit"],
)
def test_training_ends_where_a_replica_hangs(hangs: str, computed: float, sim_ranks: RankPool) -> None:
    seconds = [computed, computed + late.HANG]
    found = sim_ranks.run(f"{WAITS}:train", 2, seconds, hangs=hangs, dp=2, dp_sync="zero1", timeout=late.RUN)
    check_that_it_is_named(found, computed)
