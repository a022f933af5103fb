"""FailureBoard: how a rank that failed tells the others why, so that all of them stop with the same message."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_STORE_SECONDS = 10


class FailureBoard:
    """One entry in the job's store: the first failure. Every rank makes one with the same `name`.

    A daemon thread looks at the store a few times a second and calls `on_failure(message)` once when another rank has
    written. A rank that was killed or stopped cannot write: the ranks that wait for it do, when their wait ends.
    """

    def __init__(self, store: Any, name: str, rank: int, on_failure: Callable[[str], None]):
        # A connection of its own: the store's other users may block it for as long as they wait.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._store = store
        self._key = f"fold3d/failure/{name}"
        self._rank = rank
        self._on_failure = on_failure
        self._message: str | None = None
        self._known = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fold3d-failure", daemon=True)
        self._thread.start()

    def publish(self, message: str) -> None:
        """Writes this rank's failure, unless another rank was first."""
        try:
            first = self._store.compare_set(self._key, "", message).decode()
        except Exception as error:
            logger.warning("could not tell the other ranks why this one failed: %s", error)
            first = message
        self._learn(first)

    def cause(self, wait_seconds: float) -> str | None:
        """Returns the first failure of the job, waiting a moment for its author to write it; None if nobody did."""
        self._known.wait(wait_seconds)
        return self._message

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._thread.join(timeout=_STORE_SECONDS)

    def _learn(self, message: str) -> None:
        if self._message is None:
            self._message = message
            self._known.set()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                if not self._store.check([self._key]):
                    continue
                message = self._store.get(self._key).decode()
            except Exception as error:
                if not self._closed.is_set():
                    logger.debug("the job's store does not answer: %s", error)
                return
            self._learn(message)
            self._on_failure(message)
            return
