"""Progress: where one rank is, kept by the thread that trains and read by the one that reports it to the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from fold3d.faults.lifetime import Lifetime
from fold3d.schedule import Schedule


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


class WalksActions(Protocol):
    """What runs a schedule."""

    def current_action(self) -> str:
        """Text of the action in progress, "" between runs; any thread."""


class Progress:
    """Where this rank is, and in `life` whether it may go on."""

    def __init__(self) -> None:
        self.life = Lifetime()
        self.run = 0
        self.schedule: Schedule | None = None
        """Of the last run begun."""
        self.doing = ""
        self.meets = False
        self._met: list[tuple[int, int]] = []
        self._executor: WalksActions | None = None
        self._beat = 0

    def follow(self, executor: WalksActions | None) -> None:
        """From now on reports say which action `executor` is in."""
        self._executor = executor

    def met(self, start_ns: int, end_ns: int) -> None:
        """A small exchange with other ranks took so long; ns of time.monotonic."""
        self._met.append((start_ns, end_ns))

    def take_met(self) -> list[tuple[int, int]]:
        """Returns what `met` was told since the last call."""
        met, self._met = self._met, []
        return met

    def report(self, *, closed: bool = False) -> Report:
        """Returns the next report. Any thread; costs nothing where the rank works."""
        self._beat += 1
        executor, schedule = self._executor, self.schedule
        action = executor.current_action() if executor is not None and not closed else ""
        return Report(
            beat=self._beat,
            run=self.run,
            micro_batches=0 if schedule is None else schedule.micro_batches,
            action=action,
            doing=self.doing,
            meets=self.meets,
            closed=closed,
        )

    def begin(self, schedule: Schedule) -> None:
        """A run begins."""
        self.schedule = schedule
        self.run += 1

    @contextlib.contextmanager
    def during(self, doing: str, *, meets: bool = False) -> Iterator[None]:
        """Says what the body does. `meets`: it ends only when other ranks have come to the same point."""
        before = self.doing, self.meets
        self.doing, self.meets = doing, meets
        try:
            yield
        finally:
            self.doing, self.meets = before
