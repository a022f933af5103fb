"""The dependency rule, line by line."""

from __future__ import annotations

import pytest

from fold3d import schedule

# pp=2, segments=2: chunks 0 2 on rank 0, chunks 1 3 on rank 1
COMPUTE = schedule.generate("aiao", pp=2, segments=2, micro_batches=2)
LOWERED = schedule.lower(COMPUTE, reduce=True)


def waits(made: schedule.Schedule, text: str) -> list[str]:
    return [action.text for action in schedule.waits_for(made, schedule.parse_action(text))]


@pytest.mark.parametrize(
    "action, compute_only, lowered",
    [
        ("0F0", [], []),
        ("1F1", ["0F1"], ["1RECV_F1"]),
        ("2F0", ["1F0"], ["2RECV_F0"]),
        ("3B0", ["3F0"], ["3F0"]),
        ("1B0", ["1F0", "2B0"], ["1F0", "1RECV_B0"]),
        ("1SEND_F0", ["1F0"], ["1F0"]),
        ("2RECV_F1", ["1SEND_F1"], ["1SEND_F1"]),
        ("2SEND_B1", ["2B1"], ["2B1"]),
        ("1RECV_B1", ["2SEND_B1"], ["2SEND_B1"]),
        ("3REDUCE_GRAD", ["3B0", "3B1"], ["3B0", "3B1"]),
    ],
)
def test_rule(action: str, compute_only: list[str], lowered: list[str]):
    assert waits(COMPUTE, action) == compute_only
    assert waits(LOWERED, action) == lowered


def test_one_stage_has_no_links():
    alone = schedule.generate("aiao", pp=1, segments=2, micro_batches=1)
    assert waits(alone, "1F0") == ["0F0"]
    assert waits(alone, "0B0") == ["0F0", "1B0"]
    assert schedule.lower(alone, reduce=False) == alone


def test_split_backward():
    """The gradient comes from I where the next chunk's backward is split, from B where it is not."""
    mixed = schedule.parse_csv("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1B1,1W0\n")
    schedule.validate(mixed)
    assert waits(mixed, "0B0") == ["0F0", "1I0"]
    assert waits(mixed, "0B1") == ["0F1", "1B1"]
    assert waits(mixed, "1W0") == ["1I0"]
    assert waits(mixed, "1SEND_B0") == ["1I0"]
    assert waits(mixed, "1REDUCE_GRAD") == ["1W0", "1B1"]
    lowered = schedule.lower(mixed, reduce=True)
    assert [a.text for a in lowered.ranks[1]][-2:] == ["1W0", "1REDUCE_GRAD"]


@pytest.mark.parametrize("text", ["0RECV_F0", "3RECV_B0"])
def test_nothing_feeds_the_ends(text: str):
    with pytest.raises(ValueError, match="has no sender"):
        waits(LOWERED, text)
