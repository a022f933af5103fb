"""announce(): what a user should read once who has not said a word about logging."""

from __future__ import annotations

import sys
from logging import Logger


def announce(logger: Logger, text: str) -> None:
    """Logs `text` at INFO; where nobody has configured logging it goes to stderr, as warnings do."""
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        sys.stderr.write(f"fold3d: {text}\n")
