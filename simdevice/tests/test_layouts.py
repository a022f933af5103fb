"""Several ranks train on the simulated device: the CPU's bits, no race, and one for each ordering that is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist import dp_sync_jobs
from tests.dist.parity_cases import Case
from tests.dist.test_parity import GRID as WHOLE_GRID
from tests.helpers.ranks import RankPool

LAYOUTS = "simdevice.tests.layouts"
PP = Case(pp=2, m=3)
DP = Case(dp=2, m=2, segments=2, schedule="aiao", dp_sync="early")
ZERO1 = replace(DP, dp_sync="zero1")
FOLD = Case(pp=2, m=4, segments=2, schedule="fold")
"""All four queues of both ranks have something to do."""
LONG = replace(FOLD, m=8)
"""Memory of messages is used again within a step: from one step to the next the host has waited meanwhile."""
GRID = [case for case in WHOLE_GRID if case.ranks == 2 and case.through == "engine"]
SQUARE = Case(dp=2, pp=2, m=3, segments=2, schedule="aiao", dp_sync="early")


def check(pool: RankPool, case: Case) -> None:
    launches = pool.run(f"{LAYOUTS}:as_on_the_cpu", case.ranks, case, 100, timeout=150.0)
    assert min(launches) > 100


@pytest.mark.parametrize(
    "case",
    [replace(FOLD, labels="padded", recompute=True, kernels="fold3d"), replace(ZERO1, kernels="fold3d")],
    ids=lambda case: case.name,
)
def test_two_processes_train_with_the_bits_of_the_cpu(case: Case, sim_ranks: RankPool) -> None:
    check(sim_ranks, case)


@pytest.mark.parametrize(
    "case",
    [
        PP,
        Case(pp=2, m=3, segments=2, schedule="interleaved", family="llama", tied=False),
        Case(pp=2, m=3, schedule="zb_h1"),
        DP,
        replace(DP, dp_sync="serial"),
        replace(DP, dtype="bfloat16"),
        replace(FOLD, dtype="bfloat16", clip=False),  # torch rounds its coefficient on the CPU
        replace(ZERO1, offload_optimizer=True),
        replace(PP, offload_optimizer=True),
        replace(PP, segments=2, schedule="aiao", offload="activations", dtype="float32"),
        replace(PP, segments=2, schedule="aiao", offload="boundaries", recompute=True),
        replace(PP, m=4, segments=4, layers=8, schedule="aiao", offload="activations:50%", labels="padded"),
    ],
    ids=lambda case: case.name,
)
def test_other_cases(case: Case, sim_ranks: RankPool) -> None:
    check(sim_ranks, case)


@pytest.mark.parametrize("case", GRID[::2], ids=lambda case: case.name)
def test_layouts_of_the_parity_grid(case: Case, sim_ranks: RankPool) -> None:
    """Two processes; FOLD3D_TEST_DEVICE=sim runs all of it, against the stock Trainer (tests/dist/test_parity.py)."""
    check(sim_ranks, case)


@pytest.mark.parametrize(
    "case",
    [
        SQUARE,
        replace(SQUARE, dp_sync="zero1"),
        replace(SQUARE, dp_sync="serial"),
        replace(SQUARE, recompute=True, offload="boundaries", dp_sync="zero1"),
        replace(SQUARE, offload="activations", offload_optimizer=True),
    ],
    ids=lambda case: case.name,
)
def test_four_processes(case: Case, sim_ranks4: RankPool) -> None:
    check(sim_ranks4, case)


@pytest.mark.parametrize("case", [FOLD, ZERO1], ids=["pp2", "dp2"])
def test_a_bound_device_changes_nothing(case: Case, sim_ranks: RankPool) -> None:
    launches = sim_ranks.run(f"{LAYOUTS}:as_on_the_cpu_when_bound", 2, case, timeout=150.0)
    assert min(launches) > 500


def test_messages_of_other_shapes_come_between(sim_ranks: RankPool) -> None:
    case = Case(pp=2, m=3, segments=2, schedule="fold")
    assert sim_ranks.run(f"{LAYOUTS}:ragged", 2, case, timeout=150.0) == [(10, 8)] * 2


@pytest.mark.parametrize("case", [PP, FOLD], ids=["1f1b", "fold"])
def test_a_forward_that_waits_for_its_device_waits_for_no_message(case: Case, sim_ranks: RankPool) -> None:
    """No device is told to receive before another was told to send."""
    calls = sim_ranks.run(f"{LAYOUTS}:synchronizing", 2, case, timeout=150.0)
    assert min(calls) > 100


@pytest.mark.parametrize("case", [FOLD, DP, ZERO1], ids=["pp2", "early", "zero1"])
def test_the_host_waits_for_no_norm_and_no_weights(case: Case, sim_ranks: RankPool) -> None:
    """Of a step it waits for the loss, and with several stages for the fingerprints of the batch and of what the loss
    calls the model with."""
    for rank, waits in enumerate(sim_ranks.run(f"{LAYOUTS}:waits_of_a_step", 2, case, timeout=150.0)):
        assert waits.pop("run") == (case.dp > 1 or rank == 1) + 2 * (case.pp > 1)
        assert waits == {"clip": 0, "step": 0, "flush": 0}


@pytest.mark.parametrize("case", [FOLD, ZERO1, DP], ids=["pp2", "zero1", "early"])
def test_a_loss_scaler_waits_once_for_its_verdict(case: Case, sim_ranks: RankPool) -> None:
    case = replace(case, dtype="float32")
    for rank, waits in enumerate(sim_ranks.run(f"{LAYOUTS}:waits_of_a_step", 2, case, scales=True, timeout=150.0)):
        assert waits.pop("run") == (case.dp > 1 or rank == 1) + 2 * (case.pp > 1)
        assert waits == {"clip": 0, "step": 1, "update": 0, "flush": 0}


@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_an_infinity_on_one_replica_skips_the_step_on_both(dp_sync: str, sim_ranks: RankPool) -> None:
    case = replace(DP, dtype="float32", dp_sync=dp_sync)
    sim_ranks.run(f"{LAYOUTS}:on_the_device", 2)
    for seen in sim_ranks.run(dp_sync_jobs.train_with_infinity, 2, case, 1, 1, 1, timeout=150.0):
        assert [torch.isfinite(torch.tensor(norm)).item() for norm in seen.norms] == [True, False, True, True]
        assert seen.scales == [256.0, 128.0, 128.0, 128.0]
        before, after = seen.weights[1:3]
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("case", "bad_rank"), [(PP, 1), (ZERO1, 0)], ids=["pp2", "dp2"])
def test_a_rank_that_raises_ends_the_step_on_all(case: Case, bad_rank: int, sim_ranks: RankPool) -> None:
    for seconds, message in sim_ranks.run(f"{LAYOUTS}:failing", 2, case, bad_rank):
        assert f"rank {bad_rank}" in message and "on purpose" in message
        assert seconds < 30


@pytest.mark.parametrize(
    ("case", "ordering", "thread"),
    [
        (FOLD, "event_block", "send_f"),  # what is sent has been computed
        (FOLD, "event_block", "send_b"),
        (LONG, "event_block", "recv_f"),  # memory that is received into is not read any more
        (LONG, "event_block", "recv_b"),
        (FOLD, "work_wait", "send_f"),  # what is sent is not overwritten before it has left
        (FOLD, "work_wait", "send_b"),
        (FOLD, "work_wait", "recv_f"),  # what was received is there
        (FOLD, "work_wait", "recv_b"),
        (FOLD, "event_block", "main"),  # what was received is waited for where it is used
        (FOLD, "work_wait", "main"),  # the norm of all stages is there
        (DP, "event_block", "reduce"),  # gradients that are summed are complete
        (DP, "work_wait", "reduce"),  # sums are there
        (DP, "work_wait", "gather"),
        (DP, "event_block", "gather"),  # sums that are gathered are there
        (DP, "event_block", "main"),  # sums and gathers are waited for where they are used
        (DP, "work_wait", "main"),
        (ZERO1, "event_block", "gather"),  # weights that are gathered have been stepped
        (ZERO1, "event_block", "main"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.dp_sync if value.dp > 1 else "pp2",
)
def test_an_ordering_that_is_forgotten_is_a_race(case: Case, ordering: str, thread: str, sim_ranks: RankPool) -> None:
    found = sim_ranks.run(f"{LAYOUTS}:forgotten", 2, case, ordering, thread, timeout=150.0)
    assert any(found), "no rank reported a race"
