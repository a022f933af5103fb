"""What a training costs on machines that can be rented, how long it takes, and what meets a deadline for least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fold3d.cluster.deadline import Due, Market, Mixture, mixture
from fold3d.cluster.devices import Machine
from fold3d.cluster.jobs import Option
from fold3d.cluster.rates import Estimate, Measured, estimate

_HOUR = 3600.0
GREEDY, UNIFORM = "greedy", "uniform progress"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePlan:
    """What the planner says of a model on some machines."""

    machine: Machine
    rate: float
    """Tokens per second; 0 where it cannot run."""
    layout: str = ""
    """Such as `dp=4 tp=2 pp=1`."""
    flags: str = ""
    """The Trainer's arguments that pin it."""
    memory_bytes: int = 0
    """Of the fullest GPU."""
    reason: str = ""
    """Why it cannot run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What the training costs on some machines. Money is in the unit of the prices."""

    plan: MachinePlan
    known: Estimate
    """Tokens per second."""
    hours: float
    hours_at_worst: float
    """With a rate that is one error lower."""
    dollars: float
    """On demand."""
    dollars_per_1e9: float
    """Tokens, on demand, without the start."""
    mixed: dict[str, Mixture]
    """With spot machines, by GREEDY and UNIFORM; empty where there are none, or the deadline cannot be met."""
    meets: bool
    """Whether the deadline is met on demand even with the lower rate; true where there is none."""

    @property
    def best(self) -> tuple[str, float]:
        """The cheapest way that is never late, `on demand` or a name of `mixed`, and what it costs."""
        ways = {"on demand": self.dollars} | {name: one.dollars for name, one in self.mixed.items() if not one.late}
        return min(ways.items(), key=lambda way: way[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What is to be trained, and how spot machines behave."""

    tokens: float
    deadline: float
    """Hours from now; infinite where there is none."""
    restart: float
    """Hours that a start takes, or a move from one machine to another."""
    up: float
    """Hours for which a spot machine stays, on average."""
    down: float
    """Hours until there is another."""
    draws: int = 1000


def estimates(plans: Sequence[MachinePlan], measured: Measured) -> list[Estimate]:
    """Returns the rate of each plan with its error: measured where `rates.json` has it, else predicted, and corrected
    by what was measured elsewhere. Raises: ConfigError for measurements in another unit.
    """
    options = [Option(one.machine.device, one.machine.all_gpus, one.rate) for one in plans]
    known = estimate(options, measured.rates)
    return [known[option] for option in options]


def offers(plans: Sequence[MachinePlan], measured: Measured, terms: Terms) -> list[Offer]:
    """Returns what each plan costs: those that meet the deadline first, by what they cost; then those that are too
    slow, the fastest first. Plans that cannot run are left out. Raises: ConfigError.
    """
    found = [_offer(*pair, terms) for pair in zip(plans, estimates(plans, measured), strict=True) if pair[1].rate > 0]
    return sorted(found, key=lambda one: (not one.meets, one.best[1] if one.meets else one.hours))


def _offer(plan: MachinePlan, known: Estimate, terms: Terms) -> Offer:
    machine, work = plan.machine, terms.tokens / known.rate / _HOUR
    price = machine.price * machine.count
    at_worst = work * math.exp(known.error) + terms.restart
    mixed = {}
    if machine.spot is not None and work + terms.restart <= terms.deadline:
        due = Due(work=work, deadline=terms.deadline, restart=terms.restart)
        market = Market(price=price, spot=machine.spot * machine.count, up=terms.up, down=terms.down)
        names = (GREEDY, UNIFORM) if math.isfinite(terms.deadline) else (GREEDY,)
        mixed = {name: mixture(due, market, uniform=name is UNIFORM, draws=terms.draws) for name in names}
    return Offer(
        plan=plan,
        known=known,
        hours=work + terms.restart,
        hours_at_worst=at_worst,
        dollars=price * (work + terms.restart),
        dollars_per_1e9=price / (known.rate * _HOUR) * 1e9,
        mixed=mixed,
        meets=at_worst <= terms.deadline,
    )
