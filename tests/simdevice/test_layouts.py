"""Several ranks train on the simulated device: the CPU's bits, no race, and one for each ordering that is forgotten."""

from __future__ import annotations

import pytest

from tests.dist.parity_cases import Case
from tests.helpers.ranks import RankPool

LAYOUTS = "tests.simdevice.layouts"
PP = Case(pp=2, m=3)
DP = Case(dp=2, m=2, segments=2, schedule="aiao", dp_sync="early")
ZERO1 = Case(dp=2, m=2, segments=2, schedule="aiao", dp_sync="zero1")
FOLD = Case(pp=2, m=4, segments=2, schedule="fold")
"""All four queues of both ranks have something to do."""


@pytest.mark.parametrize(
    "case",
    [
        PP,
        Case(pp=2, m=4, segments=2, schedule="fold", labels="padded", recompute=True),
        Case(pp=2, m=3, segments=2, schedule="interleaved", family="llama", tied=False),
        Case(pp=2, m=3, schedule="zb_h1"),
        DP,
        ZERO1,
        Case(dp=2, m=2, segments=2, schedule="aiao", dp_sync="serial"),
    ],
    ids=lambda case: case.name,
)
def test_two_processes_train_with_the_bits_of_the_cpu(case: Case, sim_ranks: RankPool) -> None:
    launches = sim_ranks.run(f"{LAYOUTS}:as_on_the_cpu", 2, case, 100, timeout=150.0)
    assert min(launches) > 500


@pytest.mark.parametrize("case", [FOLD, ZERO1], ids=["pp2", "dp2"])
def test_a_bound_device_changes_nothing(case: Case, sim_ranks: RankPool) -> None:
    launches = sim_ranks.run(f"{LAYOUTS}:as_on_the_cpu_when_bound", 2, case, timeout=150.0)
    assert min(launches) > 500


def test_messages_of_other_shapes_come_between(sim_ranks: RankPool) -> None:
    case = Case(pp=2, m=3, segments=2, schedule="fold")
    assert sim_ranks.run(f"{LAYOUTS}:ragged", 2, case, timeout=150.0) == [(10, 8)] * 2


@pytest.mark.parametrize("case", [PP, ZERO1], ids=["pp2", "dp2"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_raises_ends_the_step_on_all(case: Case, bad_rank: int, sim_ranks: RankPool) -> None:
    for seconds, message in sim_ranks.run(f"{LAYOUTS}:failing", 2, case, bad_rank):
        assert f"rank {bad_rank}" in message and "on purpose" in message
        assert seconds < 30


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("case", "ordering", "thread"),
    [
        (FOLD, "event_block", "send_f"),  # what is sent has been computed
        (FOLD, "event_block", "send_b"),
        (FOLD, "event_block", "recv_f"),  # memory that is received into is not read any more
        (FOLD, "event_block", "recv_b"),
        (FOLD, "work_wait", "send_f"),  # what is sent is not overwritten before it has left
        (FOLD, "work_wait", "send_b"),
        (FOLD, "work_wait", "recv_f"),  # what was received is there
        (FOLD, "work_wait", "recv_b"),
        (FOLD, "event_block", "main"),  # what was received is waited for where it is used
        (DP, "event_block", "reduce"),  # gradients that are summed are complete
        (DP, "work_wait", "reduce"),  # sums are there
        (DP, "event_synchronize", "reduce"),
        (DP, "work_wait", "gather"),
        (DP, "event_synchronize", "gather"),
        (ZERO1, "event_block", "gather"),  # what is gathered is there
        (ZERO1, "event_synchronize", "gather"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.dp_sync if value.dp > 1 else "pp2",
)
def test_an_ordering_that_is_forgotten_is_a_race(case: Case, ordering: str, thread: str, sim_ranks: RankPool) -> None:
    found = sim_ranks.run(f"{LAYOUTS}:forgotten", 2, case, ordering, thread, timeout=150.0)
    assert any(found), "no rank reported a race"
