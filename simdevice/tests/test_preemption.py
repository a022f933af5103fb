"""Slices of DP.sync make room for messages that are ready, on the simulated device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.parity_cases import Case
from tests.helpers.ranks import RankPool

PREEMPTION = "simdevice.tests.preemption"
SQUARE = Case(dp=2, pp=2, m=3, segments=2, schedule="aiao", dp_sync="early")


def test_a_message_holds_slices_back_from_when_it_is_ready_and_dp_sync_goes_on(sim_ranks: RankPool) -> None:
    seen, _ = sim_ranks.run(f"{PREEMPTION}:slices_and_a_message", 2, timeout=150.0)
    assert seen["early"] > 0 and not seen["announced_early"], "it was launched, and not ready"
    assert seen["held_early"] == 0, "nor then"
    assert seen["held"] > 0 and seen["held_ns"] > 0, "it was on its way"
    assert seen["late"] > 2, "which it still was when buckets were summed"


def test_slices_are_held_back_where_a_message_arrives_from_when_it_is_ready(sim_ranks: RankPool) -> None:
    _, seen = sim_ranks.run(f"{PREEMPTION}:slices_and_an_arrival", 2, timeout=150.0)
    assert seen["early"] > 0 and seen["held_early"] == 0, "it was launched, and not ready"
    assert seen["announced"] == 1 and not seen["announced_early"]
    assert seen["held"] > 0, "this rank sends no message itself"


def test_a_message_that_counts_from_its_launch_is_noticed(sim_ranks: RankPool) -> None:
    seen, _ = sim_ranks.run(f"{PREEMPTION}:slices_and_a_message", 2, forgets=True, timeout=150.0)
    assert seen["announced_early"] and seen["early"] == 0


@pytest.mark.parametrize(
    ("case", "hosts", "over_cards"),
    [
        (SQUARE, "wxyz", True),
        (replace(SQUARE, dp_sync="zero1", schedule="fold"), "xyyx", True),
        (SQUARE, "xxyy", False),
    ],
    ids=["a card each", "a card for two", "messages within hosts"],
)
def test_training_over_cards_has_the_bits_of_the_cpu(
    case: Case, hosts: str, over_cards: bool, sim_ranks4: RankPool
) -> None:
    run = f"{PREEMPTION}:as_on_the_cpu_over_cards"
    found = sim_ranks4.run(run, 4, case, hosts, 300, timeout=150.0)
    assert [counted["messages"] > 0 for counted in found] == [over_cards] * 4


@pytest.mark.parametrize("rounds", [False, True])
def test_slices_of_a_bucket_are_not_copied_but_where_they_are_rounded(rounds: bool, sim_ranks: RankPool) -> None:
    slices = 5
    for acts in sim_ranks.run(f"{PREEMPTION}:cut_buckets", 2, slices, rounds=rounds):
        for launches, memory, right in acts:
            assert right
            if rounds:
                assert launches > slices
            else:
                assert (launches, memory) == (slices, 0), "a collective each"


def test_without_replicas_nobody_hears_of_messages(sim_ranks: RankPool) -> None:
    alone = Case(pp=2, m=3, segments=2, schedule="aiao")
    found = sim_ranks.run(f"{PREEMPTION}:as_on_the_cpu_over_cards", 2, alone, "wx", 300, timeout=150.0)
    assert [counted["messages"] for counted in found] == [0, 0]


def test_a_rank_that_raises_ends_holds_and_watches(sim_ranks4: RankPool) -> None:
    for seconds, message in sim_ranks4.run(f"{PREEMPTION}:failing_over_cards", 4, SQUARE, "wxyz", 2):
        assert "rank 2" in message and "on purpose" in message
        assert seconds < 30
