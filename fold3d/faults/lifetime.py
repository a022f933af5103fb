"""Lifetime: whether one rank may go on. The one owner of "the job has failed" and of "the engine is closed"."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from fold3d.errors import ConfigError, RankError


class Abortable(Protocol):
    """What communicates, and ends its waits when it is told to."""

    def abort(self, reason: str) -> None:
        """Ends all communication; any thread."""


class Lifetime:
    """Of one engine. Any thread may tell it of a failure and ask; the thread that trains closes it.

    The first failure wins. What communicates is registered (`end_with`, `ending`) and aborted with its message.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for what follows; not held while parts are aborted
        self._failure: str | None = None
        self._parts: list[Abortable] = []
        self._raised = False
        self._closed = False

    @property
    def failure(self) -> str | None:
        """The job's first failure, as soon as this rank knows of it."""
        return self._failure

    @property
    def is_raised(self) -> bool:
        """Whether the failure has been raised on this rank."""
        return self._raised

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed."""
        return self._closed

    def fail(self, message: str) -> bool:
        """The job has failed: ends all communication of this rank. Returns whether this is the first failure."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = message
            parts = list(self._parts)
        for part in parts:
            part.abort(message)
        return True

    def raised(self) -> None:
        """The failure is raised on this rank."""
        self._raised = True

    def close(self) -> None:
        """The engine is closed."""
        self._closed = True

    def check(self) -> None:
        """Raises RankError after a failure that was raised here, ConfigError after `close`."""
        if self._failure is not None and self._raised:
            raise RankError(f"this engine stopped at an earlier failure: {self._failure}")
        if self._closed:
            raise ConfigError(
                "this engine is closed, perhaps by a later one of its model; make a new one, with a new model"
            )

    def end_with(self, part: Abortable) -> None:
        """`part.abort(message)` is called when the job fails, or at once if it has."""
        with self._lock:
            self._parts.append(part)
            failure = self._failure
        if failure is not None:
            part.abort(failure)

    def forget(self, part: Abortable) -> None:
        """`part` is about to be closed."""
        with self._lock:
            self._parts[:] = [one for one in self._parts if one is not part]

    @contextlib.contextmanager
    def ending(self, part: Abortable) -> Iterator[None]:
        """`part.abort(message)` is called if the job has failed, or fails while the body runs, or the body fails."""
        try:
            self.end_with(part)
            yield
        except BaseException as error:
            part.abort(str(error))  # its door is shut: others need not wait for this rank
            raise
        finally:
            self.forget(part)
