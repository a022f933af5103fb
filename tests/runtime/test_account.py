"""Where a step's time went."""

from __future__ import annotations

import pytest

from fold3d.runtime.account import make_account, overlap_ns

MS = 1_000_000


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [(0, 10)], 0),
        ([(0, 10)], [(0, 10)], 10),
        ([(0, 4), (6, 9)], [(2, 7)], 3),
        ([(5, 6)], [(0, 5), (6, 9)], 0),
        ([(0, 100)], [(10, 20), (30, 40)], 20),
    ],
)
def test_overlap(first: list[tuple[int, int]], second: list[tuple[int, int]], expected: int) -> None:
    assert overlap_ns(first, second) == overlap_ns(second, first) == expected


def test_account_tells_hidden_from_exposed() -> None:
    records = [
        ("compute", "0F0", 0, 10 * MS, 0),
        ("wait", "0RECV_B0", 10 * MS, 14 * MS, 0),
        ("compute", "0B0", 14 * MS, 30 * MS, 0),
        ("reduce", "2REDUCE_GRAD", 12 * MS, 20 * MS, 4096),
        ("reduce", "0REDUCE_GRAD", 30 * MS, 37 * MS, 4096),
        ("send_f", "0SEND_F0", 10 * MS, 11 * MS, 512),
        ("wait", "0REDUCE_GRAD", 30 * MS, 37 * MS, 0),
    ]
    account = make_account(records, 0, 37 * MS)
    assert account.step_ms == 37
    assert account.compute_ms == 26
    assert account.exposed_pp_ms == 4
    assert account.exposed_dp_ms == 7
    assert account.hidden_dp_ms == 6
    assert (account.pp_bytes, account.dp_bytes) == (512, 8192)
