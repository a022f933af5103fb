"""Schedules as CSV files, in the form of torch.distributed.pipelining: one line per rank, cells like 2F0."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from fold3d import _C
from fold3d.errors import ConfigError


def parse_csv(text: str) -> _C.Schedule:
    """Returns the schedule written in `text`; empty cells are idle steps and are dropped.

    pp is the number of lines; segments and micro-batches follow from the largest chunk and micro-batch.

    Raises: ConfigError naming line and column of a cell that is not an action.
    """
    try:
        return _C.parse_csv(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def load_csv(path: str | PathLike[str]) -> _C.Schedule:
    """Returns the schedule in a CSV file; it is not validated yet.

    Raises: ConfigError if the file cannot be read or has a cell that is not an action.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the schedule {str(path)!r}: {error}") from None
    try:
        return parse_csv(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_csv(schedule: _C.Schedule, path: str | PathLike[str]) -> None:
    """Writes the schedule; `load_csv` gives it back, and torch's own loader takes it."""
    Path(path).write_text(schedule.csv(), encoding="utf-8")
