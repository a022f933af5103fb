"""announce: seen once on the console, whatever a script has done with logging, and on lines of its own."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from fold3d.observe.announce import announce


@pytest.fixture
def root() -> logging.Logger:
    """A root logger of its own, as a script begins with."""
    return logging.RootLogger(logging.WARNING)


def logger_of(root: logging.Logger) -> logging.Logger:
    made = logging.Logger("fold3d.somewhere")
    made.parent = root
    return made


def console(level: int = logging.NOTSET) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    return handler


def test_without_handlers_it_goes_to_stderr(capsys: pytest.CaptureFixture[str], root: logging.Logger) -> None:
    announce(logger_of(root), "chosen")
    assert capsys.readouterr() == ("", "fold3d: chosen\n")


def test_where_only_warnings_are_shown(capsys: pytest.CaptureFixture[str], root: logging.Logger) -> None:
    """What logging.basicConfig() does, and with it most scripts."""
    root.addHandler(console())
    announce(logger_of(root), "chosen")
    assert capsys.readouterr().err == "fold3d: chosen\n"


def test_where_the_console_shows_it_once(capsys: pytest.CaptureFixture[str], root: logging.Logger) -> None:
    root.addHandler(console())
    logger = logger_of(root)
    logger.setLevel(logging.INFO)
    announce(logger, "chosen")
    assert capsys.readouterr().err == "INFO chosen\n"


def test_a_handler_with_a_level_of_its_own(capsys: pytest.CaptureFixture[str], root: logging.Logger) -> None:
    root.addHandler(console(logging.ERROR))
    logger = logger_of(root)
    logger.setLevel(logging.INFO)
    announce(logger, "chosen")
    assert capsys.readouterr().err == "fold3d: chosen\n"


def test_a_log_file_is_no_console(capsys: pytest.CaptureFixture[str], root: logging.Logger, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log")
    root.addHandler(handler)
    logger = logger_of(root)
    logger.setLevel(logging.INFO)
    announce(logger, "chosen")
    handler.close()
    assert capsys.readouterr().err == "fold3d: chosen\n"
    assert (tmp_path / "log").read_text() == "chosen\n"


def test_silent_for_who_wants_silence(
    capsys: pytest.CaptureFixture[str], root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fold3d"), "level", logging.WARNING)
    announce(logger_of(root), "chosen")
    assert capsys.readouterr().err == ""


def test_a_progress_bar_is_not_written_into(monkeypatch: pytest.MonkeyPatch, root: logging.Logger) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with tqdm(total=3, file=stream, mininterval=0) as bar:
        bar.update(1)
        announce(logger_of(root), "chosen\n  a table")
        bar.update(1)
    shown = stream.getvalue()
    before, after = shown.split("fold3d: chosen\n  a table\n")
    assert before.endswith("\r") and "33%" in before, "the bar is cleared first"
    assert "33%" in after, "and drawn again below"
