"""Ctrl-C in a job of several processes: every rank ends with one line, not with a traceback of where it was."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from fold3d.errors import RankError

logger = logging.getLogger(__name__)

INTERRUPTED = "was interrupted (Ctrl-C)"
"""What ranks tell each other of it."""
EXIT_STATUS = 130
"""As a shell has it for a process that Ctrl-C ended."""
_REPEAT_SECONDS = 2.0
"""A launcher passes on the Ctrl-C that its ranks had from the terminal already."""


def is_interruption(message: str | None) -> bool:
    """Returns whether the failure that `message` tells of is somebody's Ctrl-C."""
    return message is not None and INTERRUPTED in message


def end_with_a_line(rank: str) -> None:
    """From now on an interruption that nobody catches, of `rank` or of another, is written as one line by this process.

    Where it was, and the stack, are logged at level DEBUG.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(rank)


def swallow_repeats() -> None:
    """A Ctrl-C is being dealt with: the same one, passed on by a launcher, must not disturb that."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        return
    since = time.monotonic()

    def handler(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - since > _REPEAT_SECONDS:
            signal.signal(signal.SIGINT, usual)
            usual(number, frame)

    signal.signal(signal.SIGINT, handler)


class _Hook:
    """sys.excepthook of a rank, in front of the one that was there."""

    def __init__(self, rank: str) -> None:
        self._rank, self._before = rank, sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            line = f"{self._rank} {INTERRUPTED}"
        elif isinstance(error, RankError) and is_interruption(str(error)):
            line = f"{self._rank} stops: {error}"
        else:
            self._before(kind, error, trace)
            return
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the interpreter still does takes a moment
        gc.freeze()  # its last search for cycles, through all that torch and transformers are, took the most of it
        logger.debug("%s", line, exc_info=(kind, error, trace))
        sys.stderr.write(f"fold3d: {line}\n")
        sys.stderr.flush()
