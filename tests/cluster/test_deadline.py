"""Deadlines with spot machines: the rules on cases that can be worked out, and on machines that come and go."""

from __future__ import annotations

import math

import pytest

from fold3d.cluster.deadline import Due, Market, Where, decide, mixture
from fold3d.errors import ConfigError

DUE = Due(work=48.0, deadline=55.0, restart=0.1)
IDLE, SPOT, DEMAND = Where.IDLE, Where.SPOT, Where.ON_DEMAND
NEVER = {"up": 1e-9, "down": 1e9}
ALWAYS = {"up": 1e9, "down": 1e-9}


@pytest.mark.parametrize(
    "where, now, done, has_spot, uniform, wanted",
    [
        (SPOT, 54.0, 0.0, True, True, SPOT),  # rule 1: whatever the time
        (SPOT, 10.0, 9.0, False, True, IDLE),  # lost, and ahead of 10 * 48 / 55 = 8.73
        (SPOT, 10.0, 8.0, False, True, DEMAND),  # lost, and behind
        (SPOT, 10.0, 8.0, False, False, IDLE),  # greedy waits
        (IDLE, 10.0, 8.0, True, True, SPOT),
        (IDLE, 6.81, 0.0, True, False, DEMAND),  # rule 2: 48.19 h are left for 48 h and 0.2 h
        (IDLE, 6.79, 0.0, True, False, SPOT),
        (DEMAND, 10.0, 8.8, True, True, DEMAND),  # ahead, but of 10.2 * 48 / 55 = 8.90 only then
        (DEMAND, 10.0, 8.91, True, True, SPOT),
        (DEMAND, 10.0, 8.91, False, True, IDLE),
        (DEMAND, 54.0, 47.0, True, True, DEMAND),  # rule 2 keeps it
    ],
)
def test_the_rules(where: Where, now: float, done: float, has_spot: bool, uniform: bool, wanted: Where) -> None:
    assert decide(DUE, where, now=now, done=done, has_spot=has_spot, uniform=uniform) is wanted


@pytest.mark.parametrize("uniform", [True, False])
def test_machines_that_are_never_or_always_there(uniform: bool) -> None:
    never = mixture(DUE, Market(price=3.0, spot=1.0, **NEVER), uniform=uniform, draws=3)
    assert (never.spot, never.late) == (0.0, 0.0) and never.hours <= 55.0 + 1e-6
    if not uniform:  # it waits until 2 restarts before it must begin; takes one to start
        assert never.hours == pytest.approx(54.9) and never.dollars == pytest.approx(3 * 48.1)
    always = mixture(DUE, Market(price=3.0, spot=1.0, **ALWAYS), uniform=uniform, draws=3)
    assert (always.spot, always.late) == (1.0, 0.0)
    assert (always.hours, always.dollars) == (pytest.approx(48.1), pytest.approx(48.1))


def test_without_a_deadline_a_job_waits_for_spot_machines() -> None:
    """Half of the time there is none, and each of the 48 / 4 = 12 losses costs a restart."""
    free = Due(work=48.0, deadline=math.inf, restart=0.1)
    made = mixture(free, Market(price=3.0, spot=1.0, up=4.0, down=4.0), draws=300)
    assert (made.spot, made.late) == (1.0, 0.0)
    assert made.dollars == pytest.approx(49.2, rel=0.01) and made.hours == pytest.approx(2 * 49.2, rel=0.1)


def test_who_cannot_be_in_time_is_late() -> None:
    tight = Due(work=48.0, deadline=48.05, restart=0.1)
    assert mixture(tight, Market(price=3.0, spot=1.0, up=4.0, down=4.0), draws=5).late == 1.0


def test_never_late_and_hardly_dearer_than_waiting() -> None:
    """1,000 draws over six markets and deadlines: none late, and on average no more than 2 % above greedy's."""
    ratios = []
    for deadline in (55.0, 72.0):
        for up, down in ((8.0, 2.0), (4.0, 4.0), (2.0, 8.0)):
            due, market = Due(work=48.0, deadline=deadline, restart=0.1), Market(price=3.0, spot=1.0, up=up, down=down)
            made = [mixture(due, market, uniform=uniform, draws=167) for uniform in (True, False)]
            assert [one.late for one in made] == [0.0, 0.0]
            assert all(one.hours <= deadline for one in made)
            ratios.append(made[0].dollars / made[1].dollars)
    assert sum(ratios) / len(ratios) <= 1.02
    assert min(ratios) < 0.9, "and it saves where the deadline is near"


def test_the_same_again() -> None:
    market = Market(price=3.0, spot=1.0, up=4.0, down=4.0)
    assert mixture(DUE, market, draws=20) == mixture(DUE, market, draws=20) != mixture(DUE, market, draws=20, seed=1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"work": 0.0}, "the work is 0; it must be a finite number above 0, in hours"),
        ({"restart": 0.0}, "a restart is 0; it must be a finite number of 0.000277778 or more, in hours"),
        ({"deadline": -1.0}, "the deadline is -1; it must be a number above 0, in hours"),
    ],
)
def test_what_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Due(**{"work": 1.0, "deadline": 2.0, "restart": 0.1} | change)
    with pytest.raises(ConfigError, match="the market's up is 0"):
        Market(price=1.0, spot=1.0, up=0.0, down=1.0)
