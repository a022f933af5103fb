"""What jobs come when: from a file, or drawn from its models at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fold3d.cluster.fields import Field
from fold3d.cluster.jobs import Option
from fold3d.cluster.policies.fair import Group
from fold3d.cluster.rates import options_of
from fold3d.errors import ConfigError

_HOUR = 3600.0
MOST_HOURS = 1e6
"""A century and some: later than that nothing comes, and no part of a job takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A job that will arrive."""

    name: str
    at: float
    """When it arrives, in seconds since the beginning."""
    work: float
    """In the unit of the rates."""
    options: tuple[Option, ...]
    """Its true rates."""
    predicted: tuple[Option, ...] = ()
    """Rates that policies are told until others have been measured. Empty: they know the true rates."""
    weight: float = 1.0
    group: str = ""
    deadline: float = math.inf
    """Seconds after it arrived; infinite without one."""
    save_seconds: float = 0.0
    """Seconds that a move takes to save the job."""
    start_seconds: float = 0.0
    """Seconds that a start takes, the first one and that of each move."""

    def __post_init__(self) -> None:
        possible = {(option.kind, option.gpus) for option in self.options if option.rate > 0}
        unknown = {(option.kind, option.gpus) for option in self.predicted if option.rate > 0} - possible
        if unknown:
            kind, gpus = sorted(unknown)[0]
            raise ConfigError(f"job {self.name}: a rate is predicted on {kind} x{gpus}, but it has no true one there")


@dataclass(frozen=True, slots=True)
class Workload:
    """The jobs of a file, in the order in which they come."""

    jobs: tuple[Arrival, ...]
    groups: Mapping[str, Group]

    def draw(self, *, count: int, per_hour: float, seed: int) -> tuple[Arrival, ...]:
        """Returns `count` jobs drawn from the file's, at random moments: a Poisson process of so many per hour."""
        if count < 1 or not 0 < per_hour < math.inf:
            raise ConfigError(f"{count} jobs at {per_hour:g} an hour cannot be drawn; both must be positive and finite")
        if not count <= per_hour * MOST_HOURS:
            raise ConfigError(
                f"{count} jobs at {per_hour:g} an hour come over more than {MOST_HOURS:g} hours; draw fewer"
            )
        chance = random.Random(seed)
        drawn, now = [], 0.0
        for number in range(count):
            now += chance.expovariate(per_hour / _HOUR)
            job = chance.choice(self.jobs)
            drawn.append(replace(job, name=f"{job.name}#{number}", at=now))
        return tuple(drawn)


def read(path: Path) -> Workload:
    """Returns the workload of a JSON file (its form: docs/cluster.md). Raises: ConfigError that names what is wrong."""
    told = Field.load(path, "a workload").known("models", "groups", "jobs")
    models = {name: model.known(*_FIELDS) for name, model in told.at("models").items().items()}
    jobs = [_arrival(job, models, number) for number, job in enumerate(told.at("jobs").entries())]
    if not jobs:
        raise ConfigError(f'{path} has no jobs; it needs {{"models": {{...}}, "jobs": [...]}}')
    if len({job.name for job in jobs}) < len(jobs):
        raise ConfigError(f"{path}: two jobs have one name; leave names out, or give each its own")
    groups = {name: _group(group) for name, group in told.at("groups").items().items()}
    return Workload(tuple(sorted(jobs, key=lambda job: job.at)), groups)


def _group(told: Field) -> Group:
    told.known("weight", "inside")
    return Group(
        told.at("weight").number(above=0.0, default=1.0), told.at("inside").one_of(("fair", "fifo"), default="fair")
    )


_FIELDS = (
    *("model", "name", "at_hours", "work", "hours_on", "rates", "predicted", "weight", "group", "deadline_hours"),
    *("save_seconds", "start_seconds"),
)


def _arrival(told: Field, models: Mapping[str, Field], number: int) -> Arrival:
    told.known(*_FIELDS)
    model = told.at("model").one_of(tuple(models)) if "model" in told else None

    def own(name: str) -> Field:
        common = models[model] if model is not None else told
        return common.at(name) if name in common and name not in told else told.at(name)

    def seconds(name: str) -> float:
        return own(name).number(most=MOST_HOURS * _HOUR, default=0.0, unit="in seconds")

    options = options_of(own("rates"))
    return Arrival(
        name=own("name").text(default=f"{model or 'job'}-{number}"),
        at=own("at_hours").number(most=MOST_HOURS, default=0.0, unit="in hours") * _HOUR,
        work=_work(own, options),
        options=options,
        predicted=() if (predicted := own("predicted")).absent else options_of(predicted),
        weight=own("weight").number(above=0.0, default=1.0),
        group=own("group").text(default=""),
        deadline=own("deadline_hours").number(above=0.0, most=MOST_HOURS, default=math.inf, unit="in hours") * _HOUR,
        save_seconds=seconds("save_seconds"),
        start_seconds=seconds("start_seconds"),
    )


def _work(own: Callable[[str], Field], options: Sequence[Option]) -> float:
    """Returns a job's work in the unit of its rates. What it says wins over what its model says.

    Args:
        own: gives its fields, or its model's.
    """
    told = own("hours_on")
    if told.absent:
        if own("work").absent:
            raise own("work").error('is missing; say it in the unit of the rates, or "hours_on": ["a100:1", 3.5]')
        return own("work").number(above=0.0, unit="in the unit of the rates")
    place, hours = told.entries(2, '["a100:1", 3.5]')
    rates = {f"{option.kind}:{option.gpus}": option.rate for option in options if option.rate > 0}
    key = place.text() if ":" in place.text() else f"{place.text()}:1"
    if key not in rates:
        raise place.error(f"is {place.value!r}, on which it has no rate; it has {', '.join(rates)}")
    return hours.number(above=0.0, most=MOST_HOURS, unit="in hours") * _HOUR * rates[key]
