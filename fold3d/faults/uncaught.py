"""What a rank writes of an error that nobody catches: the rank that failed says what and where, others one line."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

from fold3d.errors import Fold3dError, RankError

logger = logging.getLogger(__name__)

INTERRUPTED = "was interrupted (Ctrl-C)"
"""What ranks tell each other of it."""
EXIT_STATUS = 130
"""As a shell has it for a process that Ctrl-C ended."""
WHOLE_STACKS = "FOLD3D_TRACEBACKS"
"""Environment variable: with 1 Python writes errors as it always does."""
_REPEAT_SECONDS = 2.0
"""A launcher passes on the Ctrl-C that its ranks had from the terminal already."""
_FRAMES = 6
"""How many of the user's and the model's lines are shown, the innermost."""
_SHORT = 500
"""Characters of another rank's error that a rank repeats."""
_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_PYTHONS = str(Path(os.__file__).parent)
_OF_THE_LOOP = ("transformers/trainer.py", "transformers/trainer_callback.py", "accelerate/")


def is_interruption(message: str | None) -> bool:
    """Returns whether the failure that `message` tells of is somebody's Ctrl-C."""
    return message is not None and INTERRUPTED in message


def report_uncaught(rank: str, number: int) -> None:
    """From now on an error of fold3d's or of training, or an interruption, that nobody catches is written by this
    process in few lines: by the rank that failed with what to change and the lines of the user's code, by others with
    one line.

    The stack is logged at level DEBUG. A second call says the rank anew.

    Args:
        rank: what it is called.
        number: of the rank in the job.
    """
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook.name_rank(rank)
    else:
        sys.excepthook = _Hook(rank, number)


def is_first_to_fail(error: BaseException, message: str) -> None:
    """This rank is the first that failed, and others are told `message`: so it is what is written of the error if
    nobody catches it, and what torchrun is told, which would name a rank that only stopped."""
    with contextlib.suppress(AttributeError):  # of a class with __slots__
        error.fold3d_failure = message  # type: ignore[attr-defined]
    _tell_launcher(message)


def _tell_launcher(message: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    told = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    # Of the file and its folder, which are the launcher's, nothing is known: what went wrong is told elsewhere, too.
    with contextlib.suppress(OSError), open(path, "x") as file:
        json.dump({"message": told}, file)


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

    def __init__(self, rank: str, number: int) -> None:
        self._rank, self._number, self._before = rank, number, sys.excepthook

    def name_rank(self, rank: str) -> None:
        self._rank = rank

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        is_known = isinstance(error, Fold3dError) or hasattr(error, "fold3d_failure")
        if not interrupted and (not is_known or os.environ.get(WHOLE_STACKS) == "1"):
            self._before(kind, error, trace)
            return
        text = f"{self._rank} {INTERRUPTED}" if interrupted else self._text_of(error, trace)
        if interrupted or is_interruption(str(error)):
            with contextlib.suppress(ValueError):  # not on the main thread
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the interpreter still does takes a moment
            gc.freeze()  # its last search for cycles, through all that torch and transformers are, took the most of it
        logger.debug("%s", text, exc_info=(kind, error, trace))
        sys.stderr.write(f"fold3d: {text}\n")
        sys.stderr.flush()

    def _text_of(self, error: BaseException, trace: TracebackType | None) -> str:
        if told := getattr(error, "fold3d_failure", ""):
            is_own, short = True, str(told)
        elif isinstance(error, RankError):
            is_own = str(error).startswith(f"{self._rank} ")
            short = str(error)
        else:  # all ranks raise it
            is_own = self._number == 0
            short = f"{type(error).__name__}: {error}"
        if not is_own:
            line = short.splitlines()[0]
            return f"{self._rank} stops: {line if is_interruption(line) else _shortened(line)}"
        _tell_launcher(short)
        cause = trace if error.__cause__ is None else error.__cause__.__traceback__
        lines = "".join(f"\n  {line}" for line in _their_lines(cause))
        return f"{short}{lines}\n  ({WHOLE_STACKS}=1 shows the whole stack)"


def _shortened(line: str) -> str:
    """Returns the beginning of a long line."""
    return line if len(line) <= _SHORT else f"{line[:_SHORT].rstrip()} ..."


def _their_lines(trace: TracebackType | None) -> list[str]:
    """Returns which lines of the user's script and of the model were under way, the innermost last."""
    lines = [
        f"{one.filename}:{one.lineno}, in {one.name}: {one.line}"
        for one in traceback.extract_tb(trace)
        if one.line
        and not one.filename.startswith(_OURS)
        and ("-packages" in one.filename or not one.filename.startswith(_PYTHONS))
        and not any(part in one.filename for part in _OF_THE_LOOP)
    ]
    return lines[-_FRAMES:]
