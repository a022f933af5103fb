"""Jobs, the GPUs that they share, and allocations: what part of the time a job runs on which GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fold3d.errors import ConfigError


class JobError(ConfigError):
    """One job cannot be placed or allocated; the others could go on without it."""

    def __init__(self, job: str, message: str) -> None:
        """Args:
        job: its name.
        """
        super().__init__(message)
        self.job = job


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a job: so many GPUs of one kind."""

    kind: str
    """Kind of GPU, such as a100."""
    gpus: int
    rate: float
    """Work per second there, in the job's own unit (tokens, steps); 0 if the job does not fit."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"{self.kind}: a job runs on {self.gpus} GPUs; it must be at least 1")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ConfigError(f"{self.kind} x{self.gpus}: the rate is {self.rate}; it must be a number, 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training that wants GPUs."""

    name: str
    options: tuple[Option, ...]
    weight: float = 1.0
    """Its share relative to those of others."""
    group: str = ""
    """Name of its group, for the policy `hierarchical`."""
    arrived: float = 0.0
    """When it arrived, in seconds since a moment that is the same for all jobs."""
    work: float = math.inf
    """Work left, in the unit of the rates; infinite if it is not known."""
    deadline: float = math.inf
    """Seconds from now; infinite without one."""
    elapsed: float = 0.0
    """Seconds since it arrived."""
    isolated: float = 0.0
    """Seconds in which an equal share of the cluster would have done the work done so far."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"job {self.name}: its weight is {self.weight}; it must be positive")
        if not self.work > 0:
            raise ConfigError(f"job {self.name}: its work left is {self.work}; leave out jobs that are done")


@dataclass(frozen=True, slots=True)
class Kind:
    """GPUs of one kind."""

    name: str
    gpus: int
    price: float = 0.0
    """Price of one GPU for an hour, in any currency."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.price >= 0:
            raise ConfigError(
                f"{self.name}: {self.gpus} GPUs at {self.price}; there must be some, at a price of 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """All GPUs that are shared."""

    kinds: tuple[Kind, ...]

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"the cluster's kinds are {names}; there must be some, each once")

    @property
    def gpus(self) -> int:
        """Number of GPUs of all kinds."""
        return sum(kind.gpus for kind in self.kinds)

    @property
    def counts(self) -> dict[str, int]:
        """Number of GPUs of each kind, by its name; a dictionary of its own."""
        return {kind.name: kind.gpus for kind in self.kinds}

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Returns what `a100:8@2.5,t4:16` says: 8 GPUs at 2.5 an hour each, and 16. Raises: ConfigError."""
        kinds = []
        for part in text.split(","):
            found = re.fullmatch(r"([\w.-]+):(\d{1,9})(?:@(\d{1,9}(?:\.\d*)?))?", part.strip())
            if found is None:
                raise ConfigError(
                    f"{part!r} is no kind of GPU; write KIND:COUNT or KIND:COUNT@PRICE, such as a100:8@2.5"
                )
            kinds.append(Kind(found[1], int(found[2]), float(found[3] or 0.0)))
        return cls(tuple(kinds))

    def without(self, places: Iterable[Place]) -> Cluster | None:
        """Returns what is left of it beside jobs in these places; None where that is nothing."""
        taken: dict[str, int] = {}
        for place in places:
            taken[place.kind] = taken.get(place.kind, 0) + place.gpus
        left = [(kind, kind.gpus - taken.get(kind.name, 0)) for kind in self.kinds]
        kinds = tuple(replace(kind, gpus=gpus) for kind, gpus in left if gpus > 0)
        return Cluster(kinds) if kinds else None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs on the same GPUs at once (space sharing)."""

    jobs: tuple[str, str]
    kind: str
    gpus: int
    rates: tuple[float, float]
    """Work per second of each job, beside the other."""


class Place(NamedTuple):
    """GPUs for a job, or for two at once."""

    jobs: tuple[str, ...]
    kind: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the time of one job, or of two that run beside each other."""

    place: Place
    rates: tuple[float, ...]
    """Work per second of each job."""
    time: float
    """Part of all time, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The result of a policy."""

    shares: tuple[Share, ...]
    """Shares with a time above 0."""
    late: tuple[str, ...] = ()
    """With the policy `cost`: names of jobs whose deadlines cannot all be met."""

    def rates(self) -> Mapping[str, float]:
        """Returns the work per second of each job on average (Gavel's effective throughput)."""
        found: dict[str, float] = {}
        for share in self.shares:
            for name, rate in zip(share.place.jobs, share.rates, strict=True):
                found[name] = found.get(name, 0.0) + share.time * rate
        return found

    def gpus(self) -> Mapping[str, float]:
        """Returns how many GPUs of each kind are used on average."""
        found: dict[str, float] = {}
        for share in self.shares:
            kind = share.place.kind
            found[kind] = found.get(kind, 0.0) + share.time * share.place.gpus
        return found


def average_rate(job: Job, cluster: Cluster) -> float:
    """Returns the job's work per second on an average GPU of the cluster: the mean of its rates per GPU over all GPUs.

    If a kind can run it on several numbers of GPUs, the best rate per GPU counts. Divided by it, throughputs of all
    jobs have one unit, and a job on k GPUs gets k: Gavel's `throughput(m, X) / throughput(m, X_equal) * scale_factor`.
    """
    best = {kind.name: 0.0 for kind in cluster.kinds}
    for option in job.options:
        if option.kind in best:
            best[option.kind] = max(best[option.kind], option.rate / option.gpus)
    return sum(kind.gpus * best[kind.name] for kind in cluster.kinds) / cluster.gpus


def isolated_rates(jobs: Sequence[Job], cluster: Cluster) -> list[float]:
    """Returns each job's work per second with its own part, by weight, of every kind of GPU: Gavel's X_isolated.

    A job that cannot use so many GPUs runs all the time, on each kind in proportion to its GPUs.
    """
    weights = sum(job.weight for job in jobs)
    return [average_rate(job, cluster) * min(most_gpus(job), job.weight / weights * cluster.gpus) for job in jobs]


def most_gpus(job: Job) -> int:
    """Returns the largest number of GPUs on which the job runs; 0 if it runs nowhere."""
    return max((option.gpus for option in job.options if option.rate > 0), default=0)


def blind(jobs: Sequence[Job], cluster: Cluster) -> list[Job]:
    """Returns the jobs as a policy sees them that ignores kinds of GPU: each rate is the mean over the kinds.

    Where a job runs at all, and how it scales with the number of GPUs, is kept. With one kind nothing changes.
    """
    counts = cluster.counts
    seen: dict[tuple[Option, ...], tuple[Option, ...]] = {}

    def flat(options: tuple[Option, ...]) -> tuple[Option, ...]:
        usable = [option for option in options if option.kind in counts and option.rate > 0]
        mean: dict[int, float] = {}
        for gpus in {option.gpus for option in usable}:
            same = [option for option in usable if option.gpus == gpus]
            weights = sum(counts[option.kind] for option in same)
            mean[gpus] = sum(counts[option.kind] * option.rate for option in same) / weights
        return tuple(
            Option(option.kind, option.gpus, mean[option.gpus] if option in usable else 0.0) for option in options
        )

    for job in jobs:
        if job.options not in seen:
            seen[job.options] = flat(job.options)
    return [replace(job, options=seen[job.options]) for job in jobs]


def spread(shares: Sequence[Share], jobs: Sequence[Job], cluster: Cluster) -> tuple[Share, ...]:
    """Returns the shares of a blind policy over all kinds, in proportion to their GPUs, with the jobs' true rates.

    A blind program has no reason to choose a kind, so its choice is an accident of the solver. Where some job does not
    run on all kinds with the same numbers of GPUs, it stays as it is: another might not fit.
    """
    rates = {(job.name, option.kind, option.gpus): option.rate for job in jobs for option in job.options}
    parts = {kind.name: kind.gpus / cluster.gpus for kind in cluster.kinds}
    times: dict[tuple[str, int], float] = {}
    for share in shares:
        key = (share.place.jobs[0], share.place.gpus)
        times[key] = times.get(key, 0.0) + share.time
    scarce = min(kind.gpus for kind in cluster.kinds)
    if any(gpus > scarce or not rates.get((name, kind, gpus)) for name, gpus in times for kind in parts):
        return tuple(replace(one, rates=(rates[one.place.jobs[0], one.place.kind, one.place.gpus],)) for one in shares)
    return tuple(
        Share(Place((name,), kind, gpus), (rates[name, kind, gpus],), time * part)
        for (name, gpus), time in times.items()
        for kind, part in parts.items()
    )
