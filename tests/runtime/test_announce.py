"""announce: seen by who has not configured logging, and left to the configuration of who has."""

from __future__ import annotations

import logging

import pytest

from fold3d.runtime.announce import announce


def test_without_handlers_it_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    announce(logging.Logger("alone"), "chosen")
    assert capsys.readouterr() == ("", "fold3d: chosen\n")


@pytest.mark.parametrize(("level", "expected"), [(logging.INFO, ["chosen"]), (logging.WARNING, [])])
def test_handlers_decide(capsys: pytest.CaptureFixture[str], level: int, expected: list[str]) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.Logger("configured", level)
    logger.addHandler(handler)
    announce(logger, "chosen")
    assert seen == expected
    assert capsys.readouterr().err == ""
