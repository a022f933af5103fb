"""say(): what a long run tells while it runs."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Prints a line at once, where it is in nobody's way: the result goes to standard output."""
    print(text, file=sys.stderr, flush=True)
