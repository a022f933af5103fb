"""A deadline met with spot machines where they can be had, and on-demand machines where that is needed.

The rules are those of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024).
`decide` takes them one at a time, and `mixture` simulates them on machines that come and go at random.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import Enum

from fold3d.cluster.fields import Field

_EXACT = 1e-9
"""Hours that rounding may take: 4 microseconds."""
_SHORTEST = 1.0 / 3600.0
"""Hours of a restart: what is shorter would let a job change machines for ever."""


class Where(Enum):
    """Where a job is."""

    IDLE = "idle"
    SPOT = "spot"
    ON_DEMAND = "on demand"


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """A job with a deadline. All times are in hours."""

    work: float
    """Hours of work on the machines, without restarts."""
    deadline: float
    """Hours from its start; infinite without one."""
    restart: float
    """Hours from the request for machines until the first new step, with the work since the last checkpoint, which is
    lost. At least a second."""

    def __post_init__(self) -> None:
        Field(self.work, "the work").number(above=0.0, unit="in hours")
        Field(self.restart, "a restart").number(least=_SHORTEST, unit="in hours")
        if not self.deadline > 0:
            raise Field(self.deadline, "the deadline").wrong("a number above 0, in hours")

    @property
    def pace(self) -> float:
        """Hours of work per hour for uniform progress."""
        return self.work / self.deadline


def decide(due: Due, where: Where, *, now: float, done: float, has_spot: bool, uniform: bool = True) -> Where:
    """Returns where the job should be.

    1. On a spot machine it stays as long as it has it.
    2. Where the time left is less than the work left and two restarts, it takes on-demand machines and keeps them. Two:
       a spot machine may be lost while the job starts on it, and then on-demand machines take a restart, too.
    3. Uniform progress: a job behind work / deadline takes on-demand machines until it is ahead by two restarts.
       Without it (greedy), it waits for spot machines until rule 2.

    Args:
        now, done: hours since the start, and hours of work done.
        has_spot: whether a spot machine is available, or still there.
        uniform: whether rule 3 counts.
    """
    if where is Where.SPOT and has_spot:
        return where
    if due.deadline - now - (due.work - done) <= 2 * due.restart + _EXACT:
        return Where.ON_DEMAND
    if uniform and where is Where.ON_DEMAND and done < due.pace * (now + 2 * due.restart) - _EXACT:
        return where
    if has_spot:
        return Where.SPOT
    if uniform and done <= due.pace * now + _EXACT and math.isfinite(due.deadline):
        return Where.ON_DEMAND
    return Where.IDLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """Spot machines as they come and go: up and down for times that are exponentially distributed."""

    price: float
    """Price of the machines for an hour, on demand."""
    spot: float
    """The same for spot machines."""
    up: float
    """Mean hours until a spot machine is lost."""
    down: float
    """Mean hours until there is one again."""

    def __post_init__(self) -> None:
        for name in ("price", "spot", "up"):
            Field(getattr(self, name), f"the market's {name}").number(above=0.0)
        Field(self.down, "the market's down").number()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Results of the rules, averaged over many draws."""

    dollars: float
    """Cost, in the unit of the prices."""
    hours: float
    """Hours until the end."""
    spot: float
    """Part of the machine hours that were on spot machines."""
    late: float
    """Part of the draws that missed the deadline."""


def mixture(due: Due, market: Market, *, uniform: bool = True, draws: int = 1000, seed: int = 0) -> Mixture:
    """Returns what the rules cost on machines that come and go at random. Deterministic.

    Args:
        uniform: whether rule 3 counts; else greedy.
    """
    hours = spot = demand = 0.0
    late = 0
    for number in range(draws):
        end, on_spot, on_demand = _run(due, market, uniform, random.Random(f"{seed}/{number}"))
        hours, spot, demand = hours + end, spot + on_spot, demand + on_demand
        late += end > due.deadline + _EXACT
    return Mixture(
        dollars=(market.spot * spot + market.price * demand) / draws,
        hours=hours / draws,
        spot=spot / (spot + demand),
        late=late / draws,
    )


def _run(due: Due, market: Market, uniform: bool, chance: random.Random) -> tuple[float, float, float]:
    """Returns when a job is done, and the hours of spot and of on-demand machines that it takes."""
    now = done = 0.0
    taken = dict.fromkeys(Where, 0.0)
    has_spot = chance.random() * (market.up + market.down) < market.up
    change = _until_change(has_spot, market, chance)
    where, starting = Where.IDLE, 0.0
    while True:
        chosen = decide(due, where, now=now, done=done, has_spot=has_spot, uniform=uniform)
        if chosen is not where:
            where, starting = chosen, due.restart
        end = now + starting + due.work - done if where is not Where.IDLE else math.inf
        until = min(change, end, _next_look(due, where, now, done, starting, uniform))
        works = where is not Where.IDLE
        taken[where] += until - now
        done += max(0.0, until - now - starting) if works else 0.0
        starting = max(0.0, starting - (until - now))
        now = until
        if works and until == end:
            return now, taken[Where.SPOT], taken[Where.ON_DEMAND]
        if until == change:
            has_spot = not has_spot
            change = now + _until_change(has_spot, market, chance)


def _until_change(has_spot: bool, market: Market, chance: random.Random) -> float:
    mean = market.up if has_spot else market.down
    return chance.expovariate(1.0 / mean) if mean else 0.0


def _next_look(due: Due, where: Where, now: float, done: float, starting: float, uniform: bool) -> float:
    """Returns when rule 2 or 3 will say something else although no spot machine has come or gone."""
    slack = due.deadline - now - (due.work - done) - 2 * due.restart
    if where is Where.IDLE:
        behind = done / due.pace if uniform and due.pace else math.inf
        return min(now + slack, behind)
    if where is Where.ON_DEMAND and uniform and due.pace < 1.0 and slack - starting > _EXACT:
        ahead = due.pace * (now + starting + 2 * due.restart) - done
        return now + starting + max(0.0, ahead) / (1.0 - due.pace)
    return math.inf
