"""Tests that take turns: each commit runs one part of those marked `rotating`, `make test-slow` runs all of them.

The part follows from the commit's hash, so that a run can be repeated, and different commits look at different parts.
FOLD3D_ROTATION chooses it: a number, or "all" for none in the quick run, as `make test-slow` has it.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

PARTS = 12
VARIABLE = "FOLD3D_ROTATION"
ROOT = Path(__file__).resolve().parents[2]


def chosen(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the part that runs now, 0 ... PARTS - 1; None when all are slow.

    Raises: ValueError for a setting that is no part.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return int(_commit()[:8], 16) % PARTS
    if text == "all":
        return None
    if not text.isdecimal() or int(text) >= PARTS:
        raise ValueError(f'{VARIABLE}={text!r}: must be a part from 0 to {PARTS - 1}, or "all"')
    return int(text)


def part_of(test: str) -> int:
    """Returns the part that a test belongs to, by its name: the same whatever else is collected."""
    return zlib.crc32(test.encode()) % PARTS


def _commit() -> str:
    """Returns the hash of the checked-out commit, zeros where there is none (an unpacked archive)."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "0" * 40
    return done.stdout.strip()
