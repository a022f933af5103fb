"""Rounds: from the parts of the time that a policy gives to who runs where until the next round.

Gavel's mechanism (dissertation 5.5): a job's priority on a kind of GPU is what it is due there over what it has
received, jobs are placed by priority as long as GPUs are free, and what one round cannot give is made good in later
ones. Added is what a move costs: a job that has just been moved stays, and one that could stay moves only for a gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fold3d.cluster.jobs import Allocation, Cluster, Job, Place

COUNT_ANEW = 5
"""Rounds after which a new allocation lets priorities count anew; Gavel does after 1920 s, rounds of 360."""


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs when a round ends."""

    place: Place
    seconds: float
    """Since it was put there."""
    move_seconds: float
    """What a move costs it: to save, to end, to start, to build, until the first new step."""


@dataclass
class Ledger:
    """What jobs are due and what they have received, in seconds per place."""

    seconds: float = 0.0
    """Since priorities begin to count."""
    received: dict[Place, float] = field(default_factory=dict)
    """In these seconds."""
    debts: dict[Place, float] = field(default_factory=dict)
    """Due less received since the job arrived; below 0 where it received more."""

    def enter(self, allocation: Allocation, placed: Mapping[str, Place], seconds: float) -> None:
        """Enters a round of so many seconds."""
        self.seconds += seconds
        for share in allocation.shares:
            self.debts[share.place] = self.debts.get(share.place, 0.0) + share.time * seconds
        for place in set(placed.values()):
            self.received[place] = self.received.get(place, 0.0) + seconds
            self.debts[place] = self.debts.get(place, 0.0) - seconds

    def renew(self, rules: Rules) -> None:
        """Counts priorities anew for another allocation, if they have counted for long enough; debts stay."""
        if self.seconds >= COUNT_ANEW * rules.seconds:
            self.seconds = 0.0
            self.received = {}

    def forget(self, job: str) -> None:
        """Removes a job that is done."""
        for entries in (self.received, self.debts):
            for place in [place for place in entries if job in place.jobs]:
                del entries[place]

    def priority(self, place: Place, time: float) -> float:
        """Returns what is due there over what was received, infinite where that is nothing."""
        received = self.received.get(place, 0.0)
        return time * self.seconds / received if received else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How rounds are held."""

    seconds: float = 360.0
    """Of a round."""
    overhead: float = 0.05
    """The part of a job's time that moves may cost: after a move that takes 27 s it stays for 27 / 0.05 = 540 s."""
    fill: bool = True
    """Whether GPUs that are left over go to jobs that are due nothing (more) on them."""

    def lease(self, move_seconds: float) -> float:
        """Returns for how long a job stays at least where it was put, in seconds."""
        return max(self.seconds, move_seconds / self.overhead) if move_seconds else self.seconds


def place(
    allocation: Allocation,
    jobs: Sequence[Job],
    cluster: Cluster,
    ledger: Ledger,
    running: Mapping[str, Running],
    rules: Rules,
    probes: Mapping[str, Place] | None = None,
) -> dict[str, Place]:
    """Returns where jobs run in the next round; the others wait. Who runs where it ran is left alone.

    Args:
        jobs: as the policy sees them.
        probes: places that are tried for a round to measure them, before everything but leases.
    """
    turn = _Turn(jobs, cluster)
    rates = {(job.name, option.kind, option.gpus): option.rate for job in jobs for option in job.options}
    for one in running.values():
        if one.seconds < rules.lease(one.move_seconds) and one.move_seconds:
            turn.put(one.place)
    for tried in (probes or {}).values():
        turn.put(tried)
    entries = []
    for number, share in enumerate(allocation.shares):
        here = share.place
        first = (-ledger.priority(here, share.time), -ledger.debts.get(here, 0.0), -share.time)
        entries.append((first, number, here))
    later = []
    for (_, debt, time), _, here in sorted(entries, key=lambda entry: entry[:2]):
        if not rules.fill and debt + time * rules.seconds >= 0.0:  # both are negated: it has more than is due to it
            continue
        if all(_pays(name, here, running.get(name), rates, rules) for name in here.jobs):
            turn.put(here)
        else:
            later.append(here)
    for here in later:
        turn.put(here)
    if rules.fill:
        for name, one in running.items():
            if name in turn.waiting:
                turn.put(one.place)
        for job in jobs:
            for option in sorted(job.options, key=lambda option: -option.rate):
                if job.name in turn.waiting and option.rate > 0:
                    turn.put(Place((job.name,), option.kind, option.gpus))
    return turn.placed


class _Turn:
    """GPUs that are free and jobs that wait, while a round is put together."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster) -> None:
        self.waiting = {job.name for job in jobs}
        self.placed: dict[str, Place] = {}
        self._free = cluster.counts

    def put(self, here: Place) -> None:
        """Places the jobs if they wait and the GPUs are free."""
        if here.gpus <= self._free.get(here.kind, 0) and self.waiting.issuperset(here.jobs):
            self._free[here.kind] -= here.gpus
            self.waiting.difference_update(here.jobs)
            self.placed |= dict.fromkeys(here.jobs, here)


def _pays(
    name: str, here: Place, now: Running | None, rates: Mapping[tuple[str, str, int], float], rules: Rules
) -> bool:
    """Returns whether a job does more work in a lease if it moves, the seconds of the move included.

    One that does not gets the place all the same when its own is taken.
    """
    if now is None or now.place == here or not now.move_seconds:
        return True
    lease = rules.lease(now.move_seconds)
    there = rates.get((name, now.place.kind, now.place.gpus), 0.0)
    return rates.get((name, here.kind, here.gpus), 0.0) * (lease - now.move_seconds) > there * lease
