"""Values of every wrong kind in every field of every file: a clear error, or a value that is right."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fold3d.cluster import workload
from fold3d.cluster.fields import Field
from fold3d.cluster.rates import Measured, read_predictions
from fold3d.cluster.slurm.folder import Folder
from fold3d.errors import ConfigError

RATE = {"kind": "a100", "gpus": 2, "rate": 3.0}
FILES: dict[str, Any] = {
    "workload.json": {
        "models": {"m": {"rates": {"v": 2.0, "k:2": 1.0}, "save_seconds": 4.0, "start_seconds": 20}},
        "groups": {"g": {"weight": 2.0, "inside": "fifo"}},
        "jobs": [
            {"model": "m", "at_hours": 1.0, "hours_on": ["v", 2.0], "group": "g", "predicted": {"v": 1.0}},
            {"name": "a", "rates": [RATE], "work": 100.0, "deadline_hours": 3.0, "weight": 2.0},
        ],
    },
    "predicted.json": {"rates": [RATE, {"kind": "t4", "gpus": 1, "rate": 1.0}]},
    "rates.json": {
        "version": 1,
        "rates": [RATE | {"error": 0.1, "layout": "dp2"}],
        "save_seconds": 1.0,
        "start_seconds": 2.0,
        "done": 3.0,
        "left": 4.0,
    },
    "job/job.json": {
        "name": "job",
        "script": "/train.py",
        "arguments": ["--x"],
        "on": [{"kind": "a100", "nodes": 1, "per_node": 2, "rate": 2.0}],
        "output": "/out",
        "weight": 1.0,
        "group": "",
        "deadline": 9.0,
        "submitted": 5.0,
    },
    "ledger.json": {
        "seconds": 360.0,
        "until": 5.0,
        "received": [[["job"], "a100", 2, 360.0]],
        "debts": [[["job"], "a100", 2, -5.0]],
    },
}


def read_job(path: Path) -> None:
    """The job's file is one of many: an error is told, not raised."""
    wishes, damaged = Folder(path.parent.parent).wishes()
    assert len(wishes) + len(damaged) == 1
    if damaged:
        assert "fold3d cluster cancel job, and submit it again" in damaged["job"]
        raise ConfigError(damaged["job"])


READ: dict[str, Callable[[Path], Any]] = {
    "workload.json": workload.read,
    "predicted.json": read_predictions,
    "rates.json": Measured.read,
    "job/job.json": read_job,
    "ledger.json": lambda path: Folder(path.parent).ledger(),
}
WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    10**400,
    "",
    "x",
    [],
    [1],
    [[]],
    {},
    {"x": 1},
    {"": {}},
)


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yields the way to every value within another."""
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, *path, key)


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    made = copy.copy(value)
    made[path[0]] = changed(value[path[0]], path[1:], new)
    return made


@pytest.mark.parametrize("name", FILES)
def test_every_field_with_every_kind_of_value(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    read, refused = READ[name], 0
    path.write_text(json.dumps(FILES[name]))
    read(path)
    for place in places(FILES[name]):
        errors = []
        for new in WRONG:
            path.write_text(json.dumps(changed(FILES[name], place, new)))
            try:
                read(path)
            except ConfigError as error:
                errors.append(str(error))
        assert errors, f"{place} may be anything"
        assert all(str(path) in error or "job a" in error or "job m-0" in error for error in errors), errors
        refused += len(errors)
    assert refused > 60


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff", '{"a": ' + "9" * 5000 + "}"], ids=range(5))
def test_what_is_no_json(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="cannot be read as"):
        READ[name](path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read as"):
        READ[name](path)


@pytest.mark.parametrize(
    "name, place, new, message",
    [
        ("workload.json", ("jobs",), 5, r"workload\.json: jobs is 5; it must be a list"),
        ("workload.json", ("models",), None, "models is null; it must be an object"),
        ("workload.json", ("jobs", 0, "model"), ["m"], r"jobs\[0\]\.model is \['m'\]; it must be one of m"),
        ("workload.json", ("jobs", 0, "hours_on"), 5, r'hours_on is 5; it must be a list such as \["a100:1", 3\.5\]'),
        (
            "workload.json",
            ("jobs", 0, "at_hours"),
            -1.0,
            "at_hours is -1; it must be a finite number of 0 or more and up",
        ),
        (
            "workload.json",
            ("jobs", 1, "weight"),
            math.nan,
            r"jobs\[1\]\.weight is nan; it must be a finite number above 0",
        ),
        ("workload.json", ("models", "m", "start_seconds"), math.inf, r"models\.m\.start_seconds is inf; it must be"),
        ("workload.json", ("groups", "g", "inside"), "x", r"groups\.g\.inside is 'x'; it must be one of fair, fifo"),
        (
            "predicted.json",
            (),
            {},
            "rates is missing; it must be a list of rates with kind, gpus and rate, or an object",
        ),
        (
            "rates.json",
            ("rates", 0, "rate"),
            "x",
            r"rates\[0\]\.rate is 'x'; .*; delete the file, and all is measured anew",
        ),
        ("rates.json", ("version",), 2, "has version 2; this fold3d reads 1"),
        ("ledger.json", ("seconds",), "x", "seconds is 'x'; .*; delete the file, and what jobs receive counts anew"),
    ],
)
def test_what_errors_say(name: str, place: tuple[str | int, ...], new: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(changed(FILES[name], place, new)))
    with pytest.raises(ConfigError, match=message):
        READ[name](path)


def test_numbers_of_the_command_line() -> None:
    assert Field(0.5, "--every").number(above=0.0) == 0.5
    for value, shown in ((0.0, "0"), (-1.0, "-1"), (math.nan, "nan"), (math.inf, "inf")):
        with pytest.raises(ConfigError, match=f"^--every is {shown}; it must be a finite number above 0, in seconds$"):
            Field(value, "--every").number(above=0.0, unit="in seconds")
