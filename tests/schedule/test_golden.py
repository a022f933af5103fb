"""One readable CSV per schedule, so that a change of an order shows as a diff.

After a wanted change, and for a new schedule:  FOLD3D_WRITE_GOLDEN=1 python -m pytest tests/schedule/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fold3d import schedule

FOLDER = Path(__file__).parents[1] / "golden" / "schedules"
SIZE = {"pp": 3, "micro_batches": 7}
OPTIONS = {"fold": {"group_size": 2, "turn": "all"}}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.csv"


@pytest.mark.parametrize("name", schedule.names())
def test_golden(name: str):
    (info,) = [info for info in schedule.registry() if info.name == name]
    made = schedule.generate(name, **SIZE, segments=2 if info.uses_segments else 1, **OPTIONS.get(name, {}))
    if os.environ.get("FOLD3D_WRITE_GOLDEN") == "1":
        schedule.save_csv(made, path_of(name))
    assert path_of(name).is_file(), f"{path_of(name)} is missing: write it as told at the top of this file"
    assert path_of(name).read_text() == made.csv()


def test_no_golden_file_is_left_over():
    assert sorted(path.stem for path in FOLDER.glob("*.csv")) == sorted(schedule.names())
