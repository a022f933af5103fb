"""announce(): what a user should see once, whatever the script does with logging, and never in the middle of a bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def announce(logger: logging.Logger, text: str) -> None:
    """Shows `text` once on the console, on lines of its own.

    It is logged at INFO. Where no handler writes that to the console (nobody has configured logging, or for warnings
    only, as most scripts do), it goes to stderr. Silent when the level of the logger "fold3d" is above INFO.
    """
    if logging.getLogger("fold3d").level > logging.INFO:
        return
    with _beside_bars():
        logger.info("%s", text)
        if not (logger.isEnabledFor(logging.INFO) and any(map(_is_console, _handlers(logger)))):
            sys.stderr.write(f"fold3d: {text}\n")
            sys.stderr.flush()


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yields the handlers that get what is logged at INFO."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from (handler for handler in at.handlers if handler.level <= logging.INFO)
        at = at.parent if at.propagate else None


def _is_console(handler: logging.Handler) -> bool:
    """Returns whether the handler writes to stdout or stderr; a rich console does, too."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return getattr(handler, "stream", None) in streams or hasattr(handler, "console")


def _beside_bars() -> AbstractContextManager[Any]:
    """Progress bars are cleared in its body and drawn again below what was written."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)  # without it there is no bar
    if tqdm is None:
        return nullcontext()
    context: AbstractContextManager[Any] = tqdm.external_write_mode(file=sys.stderr)
    return context
