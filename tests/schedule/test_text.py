"""Actions and schedules as text."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fold3d import schedule
from fold3d.errors import ConfigError
from fold3d.schedule import Action, Kind

KINDS = [getattr(Kind, name) for name in Kind.__members__]


@settings(max_examples=100)
@given(st.integers(0, 999), st.sampled_from(KINDS), st.integers(0, 999))
def test_action_round_trip(chunk: int, kind: Kind, micro_batch: int):
    action = Action(chunk, kind) if kind == Kind.REDUCE else Action(chunk, kind, micro_batch)
    assert schedule.parse_action(action.text) == action
    assert schedule.parse_action(f"  {action.text}\t") == action
    assert pickle.loads(pickle.dumps(action)) == action


def test_spelling():
    assert Action(2, Kind.FORWARD, 0).text == "2F0"
    assert Action(1, Kind.SEND_FORWARD, 3).text == "1SEND_F3"
    assert Action(0, Kind.REDUCE).text == "0REDUCE_GRAD"
    assert repr(Action(0, Kind.BACKWARD_WEIGHT, 12)) == "0W12"


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "does not begin with the number of a chunk"),
        ("F0", "does not begin with the number of a chunk"),
        ("-1F0", "does not begin with the number of a chunk"),
        ("1F", "the micro-batch is missing"),
        ("1X0", "the kind 'X' is unknown"),
        ("1F0x", "'0x' is not a number"),
        ("1UNSHARD", "the kind 'UNSHARD' is unknown"),
        ("0REDUCE_GRAD3", "takes no number"),
        ("99999999999F0", "is not a number of at most nine digits"),
    ],
)
def test_not_an_action(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        schedule.parse_action(text)


def test_csv_of_other_writers():
    """Idle steps are empty cells; lines may end in CR LF, as Python's csv module writes them."""
    assert schedule.parse_csv("0F0,,0B0\r\n,1F0,1B0\r\n") == schedule.parse_csv("0F0,0B0\n1F0,1B0\n\n")


def test_csv_error_names_line_and_column():
    with pytest.raises(ConfigError, match="line 2, column 3: '1Q0' is not an action"):
        schedule.parse_csv("0F0,0B0\n1F0,1B0,1Q0\n")
    with pytest.raises(ConfigError, match="has no action"):
        schedule.parse_csv("\n\n")


def test_files(tmp_path):
    made = schedule.generate("aiao", pp=2, segments=2, micro_batches=3)
    schedule.save_csv(made, tmp_path / "a.csv")
    assert schedule.load_csv(tmp_path / "a.csv") == made
    (tmp_path / "sheet.csv").write_text("0F0,0B0\r\n1F0,1B0\r\n", encoding="utf-8-sig")
    assert schedule.load_csv(tmp_path / "sheet.csv").csv() == "0F0,0B0\n1F0,1B0\n"
    with pytest.raises(ConfigError, match=r"cannot read the schedule .*none\.csv"):
        schedule.load_csv(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("0F0,hello\n")
    with pytest.raises(ConfigError, match=r"bad\.csv: schedule CSV line 1, column 2"):
        schedule.load_csv(tmp_path / "bad.csv")


def test_schedules_are_values():
    one = schedule.generate("1f1b", pp=2, micro_batches=3)
    other = schedule.generate("1f1b", pp=2, micro_batches=3)
    assert one == other and hash(one) == hash(other)
    assert one != schedule.generate("gpipe", pp=2, micro_batches=3)
    assert pickle.loads(pickle.dumps(one)) == one
    one.ranks[0].clear()  # a copy
    assert one == other
