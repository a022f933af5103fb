"""Schedules as pictures."""

from __future__ import annotations

import builtins

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fold3d import schedule
from fold3d.errors import ConfigError
from fold3d.schedule import Schedule, draw
from tests.schedule.cases import schedules, split_backwards


def test_text():
    made = schedule.generate("aiao", pp=2, segments=2, micro_batches=2)
    assert draw.text(made) == (
        "time    0                   5                   10\n"
        "stage 0 0F0 0F1 2F0 2F1 .   .   .   2B0 === 2B1 === 0B0 === 0B1 ===\n"
        "stage 1 .   1F0 1F1 3F0 3F1 3B0 === 3B1 === 1B0 === 1B1 === .   .\n"
    )


def test_split_backward_takes_a_unit_each():
    made = schedule.parse_csv("0F0,0I0,0W0\n")
    assert draw.text(made) == "time    0\nstage 0 0F0 0I0 0W0\n"


@settings(max_examples=30)
@given(schedules(), st.integers(20, 200))
def test_text_fits_and_shows_every_action_once(made: Schedule, width: int):
    text = draw.text(made, width)
    assert all(len(line) <= width for line in text.splitlines())
    cells = [cell for line in text.splitlines() if line.startswith("stage") for cell in line.split()[2:]]
    assert sorted(cell for cell in cells if cell[0].isdigit()) == sorted(a.text for rank in made.ranks for a in rank)


def test_summary():
    made = schedule.generate("1f1b", pp=2, micro_batches=4)
    assert draw.summary(made) == (
        "pp=2 segments=1 m=4: 15 units (F=1, B=2), bubble 25.0 % of the compute time, "
        "at most 2 stashed activations on a stage (2, 1)"
    )


@pytest.mark.parametrize("lowered", [False, True])
def test_png(tmp_path, lowered: bool):
    made = split_backwards(schedule.generate("interleaved", pp=3, segments=2, micro_batches=4))
    if lowered:
        made = schedule.lower(made, reduce=True)
    draw.picture(made, tmp_path / "s.png", title="a title")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_png_that_cannot_be_written(tmp_path):
    made = schedule.generate("gpipe", pp=1, micro_batches=1)
    with pytest.raises(ConfigError, match="cannot write the picture"):
        draw.picture(made, tmp_path / "nowhere" / "s.png")


def test_png_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name: str, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw.picture(schedule.generate("gpipe", pp=1, micro_batches=1), tmp_path / "s.png")
