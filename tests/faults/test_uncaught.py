"""What is written of an error that nobody catches: by the rank that failed, by the others, and for torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fold3d.errors import ConfigError, RankError
from fold3d.faults.uncaught import WHOLE_STACKS, is_first_to_fail, report_uncaught


@pytest.fixture(autouse=True)
def _own_hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: sys.stderr.write("a traceback\n"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))


def loses_its_labels() -> None:
    raise ValueError("no labels")


def failed() -> ValueError:
    try:
        loses_its_labels()
    except ValueError as error:
        return error
    raise AssertionError


def written(error: BaseException, rank: str, number: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    report_uncaught(rank, number)
    try:
        raise error
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return capsys.readouterr().err.splitlines()


def test_the_rank_that_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cause, message = failed(), "rank 1 failed in 1F0 of step 3: ValueError: no labels"
    is_first_to_fail(cause, message)
    error = RankError(message)
    error.__cause__ = cause
    first, *lines, last = written(error, "rank 1", 1, capsys)
    assert first == f"fold3d: {message}" and WHOLE_STACKS in last
    assert lines[-1].endswith('in loses_its_labels: raise ValueError("no labels")') and __file__ in lines[-1]
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == message and told["extraInfo"]["timestamp"].isdecimal()


def test_the_users_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a callback's, which is raised as it is."""
    cause = failed()
    is_first_to_fail(cause, "rank 1 failed between two calls: ValueError: no labels")
    assert written(cause, "rank 1", 1, capsys)[0] == "fold3d: rank 1 failed between two calls: ValueError: no labels"


def test_a_rank_that_only_stops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = written(RankError("rank 1 failed in step 3: ValueError: no\nlabels"), "rank 0", 0, capsys)
    assert lines == ["fold3d: rank 0 stops: rank 1 failed in step 3: ValueError: no"]
    assert not (tmp_path / "error.json").exists()
    assert len(written(RankError("rank 1 " + "x" * 1000), "rank 0", 0, capsys)[0]) < 600


def test_what_all_ranks_raise_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("pp=3 needs 3 processes")
    assert written(error, "rank 0", 0, capsys)[0] == "fold3d: ConfigError: pp=3 needs 3 processes"
    sys.excepthook = sys.__excepthook__
    assert written(error, "rank 1", 1, capsys) == ["fold3d: rank 1 stops: ConfigError: pp=3 needs 3 processes"]


def test_other_errors_and_whole_stacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(failed(), "rank 0", 0, capsys) == ["a traceback"]
    monkeypatch.setenv(WHOLE_STACKS, "1")
    assert written(ConfigError("pp=3"), "rank 0", 0, capsys) == ["a traceback"]
