"""Progress: where one rank is, kept by the thread that trains and read by the one that reports it to the others."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from fold3d.faults.lifetime import Lifetime
from fold3d.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank last said about itself."""

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
    host: str = ""
    """Name of the rank's."""
    beat: int = 0
    """Number of the sign of life with which it came; it stands still when the process is dead or stopped."""

    @classmethod
    def parse(cls, sign: bytes) -> Report:
        """Returns what a sign of life brings: its number, and what `text` made."""
        beat, _, text = sign.partition(b" ")
        return replace(cls(**json.loads(text)), beat=int(beat))

    def text(self) -> str:
        """Returns the form in which the report is stored."""
        return json.dumps(asdict(self))

    def where(self) -> str:
        """Returns the place in words, e.g. "in 3B0 of step 7"."""
        if self.closed:
            return f"gone: it closed its engine or ended after {self.run} runs"
        if self.action:
            return f"in {self.action} of {self.doing or 'a run'}"
        if self.doing:
            return f"in {self.doing}"
        return "outside fold3d, between two calls" if self.run else "outside fold3d, before its first step"

    def seen(self) -> str:
        """Returns the place in words, and the host."""
        return f"{self.where()}, on host {self.host}" if self.host else self.where()


class WalksActions(Protocol):
    """What runs a schedule."""

    def current_action(self) -> str:
        """Text of the action in progress, "" between runs; any thread."""


class Progress:
    """Where this rank is, and in `life` whether it may go on."""

    def __init__(self, life: Lifetime | None = None) -> None:
        """Args:
        life: of the rank, where another thread of it has a Progress of its own; None: this is the first.
        """
        self.life = life or Lifetime()
        self.run = 0
        self.schedule: Schedule | None = None
        """Of the last run begun."""
        self.doing = ""
        self.meets = False
        self._met: list[tuple[int, int]] = []
        self._executor: WalksActions | None = None
        self._host = socket.gethostname()

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
        executor, schedule = self._executor, self.schedule
        action = executor.current_action() if executor is not None and not closed else ""
        return Report(
            run=self.run,
            micro_batches=0 if schedule is None else schedule.micro_batches,
            action=action,
            doing=self.doing,
            meets=self.meets,
            closed=closed,
            host=self._host,
        )

    def begin(self, schedule: Schedule) -> None:
        """A run begins."""
        self.schedule = schedule
        self.run += 1

    def turn_to(self, doing: str) -> None:
        """What the rank does from now on, until `during` ends."""
        self.doing = doing

    @contextlib.contextmanager
    def during(self, doing: str, *, meets: bool = False) -> Iterator[None]:
        """Says what the body does. `meets`: it ends only when other ranks have come to the same point."""
        before = self.doing, self.meets
        self.doing, self.meets = doing, meets
        try:
            yield
        finally:
            self.doing, self.meets = before
