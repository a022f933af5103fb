"""Process groups of the simulated device follow NCCL's rules."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPool

GROUPS = "simdevice.tests.groups"


@pytest.mark.parametrize("name", ["collectives", "messages", "data_parallel"])
def test_groups(name: str, sim_ranks: RankPool) -> None:
    sim_ranks.run(f"{GROUPS}:{name}", 2)


def test_a_missing_wait_is_a_race(sim_ranks: RankPool) -> None:
    for rank, reports in enumerate(sim_ranks.run(f"{GROUPS}:order", 2)):
        assert len(reports) == 2
        assert "aten::add.Tensor" in reports[0] and "simccl all_reduce" in reports[0]
        assert ("simccl send to 1", "simccl receive from 0")[rank] in reports[1]


def test_sends_that_meet_hang_until_the_time_limit(sim_ranks: RankPool) -> None:
    for rank, message in enumerate(sim_ranks.run(f"{GROUPS}:opposite_orders", 2)):
        assert f"simccl send to {1 - rank}" in message and "launched in different orders" in message


def test_messages_have_communicators_of_their_own_unless_a_device_is_bound(sim_ranks: RankPool) -> None:
    assert sim_ranks.run(f"{GROUPS}:beside_a_collective", 2, False) == ["", ""]
    assert all("did not end" in message for message in sim_ranks.run(f"{GROUPS}:beside_a_collective", 2, True))


def test_abort_ends_a_wait(sim_ranks: RankPool) -> None:
    assert sim_ranks.run(f"{GROUPS}:aborted", 2)[0] < 5


def test_sums_that_nobody_joins_fail_in_time_though_no_host_waits(sim_ranks: RankPool) -> None:
    waits, told = sim_ranks.run(f"{GROUPS}:sums_in_vain", 2)[0]
    assert waits == 0
    # By whoever notices first: the thread that launched them, or the one that waits for their end.
    for part in ("here: ", "reduce of bucket 0 (step 1)", "1.000 s (setting comm_timeout)", "replica 1 of the stage"):
        assert part in told, told
