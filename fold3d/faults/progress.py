"""Progress: where one rank is, kept by the thread that trains and read by the one that reports it to the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank last said about itself."""

    beat: int
    """Number of the report; it stands still when the process is dead or stopped."""
    run: int
    """Schedules begun so far: optimizer steps and evaluation batches, the same count on every rank."""
    micro_batches: int
    """Of the last run begun."""
    action: str
    """Action in progress, "" between runs."""
    doing: str
    """Completes "it is in ...", "" while the rank is in none of fold3d's methods."""
    meets: bool
    """It waits for ranks of its pipeline or data-parallel group; in an action, for parameters from other replicas."""
    closed: bool
    """The rank has closed its engine, or its process has ended in good order."""

    @classmethod
    def parse(cls, text: bytes) -> Report:
        """Returns what `text` made."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """Returns the form in which the report is stored."""
        return json.dumps(asdict(self))

    def where(self) -> str:
        """Returns the place in words, e.g. "in 3B0 of step 7"."""
        if self.closed:
            return f"gone: it closed its engine or ended after {self.run} runs"
        if self.action:
            return f"in {self.action} of {self.doing or 'a run'}"
        return f"in {self.doing}" if self.doing else "outside fold3d, between two calls"


class Progress:
    """Where this rank is. `executor` and `dp_sync` are set as soon as they exist."""

    def __init__(self) -> None:
        self.executor: Any = None
        self.dp_sync: Any = None
        self.run = 0
        self.micro_batches = 0
        self.doing = ""
        self.meets = False
        self.aborted: str | None = None
        self.met: list[tuple[int, int]] = []
        """When small exchanges with other ranks began and ended, ns of time.monotonic; the breakdown takes
        them."""
        self._beat = 0
        self._connecting: list[Any] = []

    def report(self, *, closed: bool = False) -> Report:
        """Returns the next report. Any thread; costs nothing where the rank works."""
        self._beat += 1
        action = self.executor.current_action() if self.executor is not None and not closed else ""
        return Report(
            beat=self._beat,
            run=self.run,
            micro_batches=self.micro_batches,
            action=action,
            doing=self.doing,
            meets=self.meets,
            closed=closed,
        )

    def begin(self, micro_batches: int) -> None:
        """A run begins."""
        self.run += 1
        self.micro_batches = micro_batches

    @contextlib.contextmanager
    def during(self, doing: str, *, meets: bool = False) -> Iterator[None]:
        """Says what the body does. `meets`: it ends only when other ranks have come to the same point."""
        before = self.doing, self.meets
        self.doing, self.meets = doing, meets
        try:
            yield
        finally:
            self.doing, self.meets = before

    def abort(self, message: str) -> None:
        """Ends all communication of this rank; any thread."""
        self.aborted = message
        for part in (*self._connecting, self.executor, self.dp_sync):
            if part is not None:
                part.abort(message)

    @contextlib.contextmanager
    def ending(self, part: Any) -> Iterator[None]:
        """`part.abort(message)` is called if the job has failed, or fails while the body runs, or the body fails."""
        self._connecting.append(part)
        try:
            if self.aborted is not None:
                part.abort(self.aborted)
            yield
        except BaseException as error:
            part.abort(str(error))  # its door is shut: others need not wait for this rank
            raise
        finally:
            self._connecting.remove(part)
