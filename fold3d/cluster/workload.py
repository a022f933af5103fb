"""What jobs come when: from a file, or drawn from its models at random."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fold3d.cluster.jobs import Option
from fold3d.cluster.policies.fair import Group
from fold3d.cluster.rates import options_of
from fold3d.errors import ConfigError

_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A job that will come."""

    name: str
    at: float
    """Seconds."""
    work: float
    """In the unit of the rates."""
    options: tuple[Option, ...]
    """Its true rates."""
    predicted: tuple[Option, ...] = ()
    """What policies are told until they have measured; nothing where they know the true rates."""
    weight: float = 1.0
    group: str = ""
    deadline: float = math.inf
    """Seconds after it came."""
    save_seconds: float = 0.0
    start_seconds: float = 0.0
    """A move costs both, the first start only this."""

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
        if count < 1 or not per_hour > 0:
            raise ConfigError(f"{count} jobs at {per_hour:g} an hour cannot be drawn; both must be positive")
        chance = random.Random(seed)
        drawn, now = [], 0.0
        for number in range(count):
            now += chance.expovariate(per_hour / _HOUR)
            job = chance.choice(self.jobs)
            drawn.append(replace(job, name=f"{job.name}#{number}", at=now))
        return tuple(drawn)


def read(path: Path) -> Workload:
    """Returns the workload of a JSON file (its form: docs/cluster.md). Raises: ConfigError that names what is wrong."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a workload: {error}") from None
    if not isinstance(found, dict) or not found.get("jobs"):
        raise ConfigError(f'{path} has no jobs; it needs {{"models": {{...}}, "jobs": [...]}}')
    models = found.get("models", {})
    jobs = [_arrival(job, models, number, path) for number, job in enumerate(found["jobs"])]
    names = {job.name for job in jobs}
    if len(names) < len(jobs):
        raise ConfigError(f"{path}: two jobs have one name; leave names out, or give each its own")
    try:
        groups = {name: Group(**group) for name, group in found.get("groups", {}).items()}
    except TypeError as error:
        raise ConfigError(f"{path}: a group has weight and inside: {error}") from None
    return Workload(tuple(sorted(jobs, key=lambda job: job.at)), groups)


_FIELDS = {
    *("model", "name", "at_hours", "work", "hours_on", "rates", "predicted", "weight", "group", "deadline_hours"),
    *("save_seconds", "start_seconds"),
}


def _arrival(job: Any, models: Mapping[str, Any], number: int, path: Path) -> Arrival:
    where = f"{path}, job {number}"
    if not isinstance(job, dict):
        raise ConfigError(f"{where} is {job!r}; it must be an object with a model or rates")
    if "model" in job and job["model"] not in models:
        raise ConfigError(
            f"{where}: the model {job['model']!r} is not among {', '.join(models) or 'the models: there are none'}"
        )
    own = {**models.get(job.get("model", ""), {}), **job}
    if set(own) - _FIELDS:
        raise ConfigError(
            f"{where} has {', '.join(sorted(set(own) - _FIELDS))}; known are {', '.join(sorted(_FIELDS))}"
        )
    options = options_of(own.get("rates"), where)
    if "hours_on" in own:
        place, hours = own["hours_on"]
        rates = {f"{option.kind}:{option.gpus}": option.rate for option in options}
        key = place if ":" in place else f"{place}:1"
        if key not in rates:
            raise ConfigError(f"{where}: hours_on names {place}, on which it has no rate; it has {', '.join(rates)}")
        work = float(hours) * _HOUR * rates[key]
    else:
        work = float(own.get("work", 0.0))
    if not (math.isfinite(work) and work > 0):
        raise ConfigError(
            f'{where}: its work is {work}; say "work" in the unit of the rates, or "hours_on": ["a100:1", 3.5]'
        )
    return Arrival(
        name=str(own.get("name", f"{own.get('model', 'job')}-{number}")),
        at=float(own.get("at_hours", 0.0)) * _HOUR,
        work=work,
        options=options,
        predicted=options_of(own["predicted"], where) if "predicted" in own else (),
        weight=float(own.get("weight", 1.0)),
        group=str(own.get("group", "")),
        deadline=float(own.get("deadline_hours", math.inf)) * _HOUR,
        save_seconds=float(own.get("save_seconds", 0.0)),
        start_seconds=float(own.get("start_seconds", 0.0)),
    )
