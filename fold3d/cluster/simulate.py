"""A cluster simulated round by round: what a policy, or other GPUs, would do to jobs that come over days; and a picture
of it: when jobs are done, how much of the GPUs is used, how fair it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fold3d.cluster.jobs import Allocation, Cluster, Job, Place, average_rate, blind, most_gpus
from fold3d.cluster.policies import Policy, allocate
from fold3d.cluster.rates import Measurement, estimate, probe
from fold3d.cluster.rounds import COUNT_ANEW, Ledger, Rules, Running, place
from fold3d.cluster.workload import Arrival
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_HOUR = 3600.0
_MOST_ROUNDS = 200_000
"""Two years, in rounds of six minutes. With 20 jobs that are there at once, it takes two minutes to simulate them."""
_MOST_IDLE = 1000
"""Rounds in which nobody runs although jobs are there."""
_BY_TIME = ("finish_time", "makespan", "shortest", "cost")
"""Policies that ask what is left of a job: they are asked again as often as that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one job."""

    name: str
    group: str
    arrived: float
    """Seconds since the simulation began."""
    finished: float
    """The same."""
    fairness: float
    """Its time over the time that it would have taken alone with an equal part of the cluster, among the jobs that were
    there (finish-time fairness, Themis); 1 or less is fair."""
    moves: int
    """From one place to another, without the first start."""
    late: bool
    """Whether it missed its deadline."""

    @property
    def seconds(self) -> float:
        """From arrival to end (JCT)."""
        return self.finished - self.arrived


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """The result of a simulation."""

    jobs: tuple[Outcome, ...]
    """The jobs that were asked about."""
    seconds: float
    """Until the last of these was done."""
    used: Mapping[str, float]
    """Per kind of GPU, the part of the time in which GPUs were used."""
    cost: float
    """Of the GPU time that was used, in the unit of the prices."""
    moving: float
    """Part of the used GPU time in which jobs were saved and started."""
    history: tuple[tuple[float, Mapping[str, int], int], ...]
    """Per round: seconds at which it began, GPUs of each kind that were used, number of jobs that waited."""

    def mean_hours(self) -> float:
        """Returns the mean time from arrival to end, in hours."""
        return sum(job.seconds for job in self.jobs) / len(self.jobs) / _HOUR


@dataclass
class _Present:
    """A job that is there."""

    arrival: Arrival
    average: float
    """Of its true rates (`jobs.average_rate`)."""
    most: int
    """GPUs."""
    left: float
    measured: tuple[Measurement, ...] = ()
    place: Place | None = None
    since: float = 0.0
    """Seconds in its place."""
    losing: float = 0.0
    """Seconds of a move that are still to come."""
    alone: float = 0.0
    """Work that it would have done with an equal part of the cluster."""
    moves: int = -1
    """Without the first start."""

    @property
    def move_seconds(self) -> float:
        return self.arrival.save_seconds + self.arrival.start_seconds

    def seen(self, now: float, seconds: float) -> Job:
        """Returns it as the policy is told. Deadlines leave room for a round of so many seconds, and a move."""
        arrival, options = self.arrival, self.arrival.options
        if arrival.predicted:
            known = estimate(arrival.predicted, self.measured)
            options = tuple(replace(option, rate=known[option].rate) for option in arrival.predicted)
        done, passed = arrival.work - self.left, now - arrival.at
        return Job(
            name=arrival.name,
            options=options,
            weight=arrival.weight,
            group=arrival.group,
            arrived=arrival.at,
            work=self.left,
            deadline=max(arrival.at + arrival.deadline - now - seconds - self.move_seconds, 1.0),
            elapsed=passed,
            isolated=passed * done / self.alone if self.alone else 0.0,
        )

    def alone_rate(self, gpus: float) -> float:
        """Returns its work per second with so many GPUs of the cluster's average (`jobs.isolated_rates`)."""
        return self.average * min(self.most, gpus)

    def wait(self, work: float) -> None:
        """Enters what it would have done with its part of the cluster."""
        self.alone += work

    def enter(self, place: Place | None) -> None:
        """Puts it there for the next round."""
        if place != self.place:
            self.since = 0.0
            if place is not None:
                self.losing = self.arrival.start_seconds + (self.arrival.save_seconds if self.moves >= 0 else 0.0)
                self.moves += 1
        self.place = place

    def run(self, seconds: float) -> tuple[float, float]:
        """Returns for how long it ran, if it is done in less than a round, and how much of that was lost to a move."""
        assert self.place is not None
        lost = min(self.losing, seconds)
        rate = next(
            option.rate
            for option in self.arrival.options
            if (option.kind, option.gpus) == (self.place.kind, self.place.gpus)
        )
        spent = min(seconds, lost + self.left / rate)
        self.losing -= lost
        self.left = max(0.0, self.left - rate * (spent - lost)) if spent == seconds else 0.0
        self.since += spent
        if spent > lost and self.arrival.predicted:
            new = Measurement(self.place.kind, self.place.gpus, rate)
            kept = [one for one in self.measured if (one.kind, one.gpus) != (new.kind, new.gpus)]
            self.measured = (*kept, new)
        return spent, lost


def simulate(
    arrivals: Sequence[Arrival],
    policy: Policy,
    cluster: Cluster,
    rules: Rules | None = None,
    *,
    looked_at: range | None = None,
) -> SimulationReport:
    """Returns the result of a policy for jobs that arrive over time, simulated round by round. Deterministic.

    Policies know the work left of each job, and its true rates. If an arrival has predicted rates, they know these,
    corrected by what the running jobs measure in each round; jobs are tried on kinds that they have not run on.

    Args:
        arrivals: in the order in which they arrive.
        rules: length of rounds, and what moves may cost. None: the defaults, and `fill` as the policy needs it.
        looked_at: numbers of the arrivals whose end ends the simulation and which the report is about. None: all.

    Raises: ConfigError for jobs that run nowhere, for a policy that lets jobs wait for ever, and without scipy.
    """
    run = _Run(arrivals, policy, cluster, rules or Rules(fill=policy.fills))
    return run.report(looked_at if looked_at is not None else range(len(arrivals)))


@dataclass
class _Run:
    """A simulation while it runs."""

    arrivals: Sequence[Arrival]
    policy: Policy
    cluster: Cluster
    rules: Rules
    now: float = 0.0
    present: dict[str, _Present] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    finished: dict[str, Outcome] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    lost: float = 0.0
    history: list[tuple[float, Mapping[str, int], int]] = field(default_factory=list)

    def report(self, looked_at: range) -> SimulationReport:
        wanted = {self.arrivals[number].name for number in looked_at}
        if not wanted:
            raise ConfigError(f"none of the {len(self.arrivals)} jobs is looked at")
        self._check_lengths()
        coming, changed, idle = 0, True, 0
        allocation, jobs = Allocation(()), list[Job]()
        while not wanted <= self.finished.keys():
            if not self.present:
                self.now = max(self.now, self.arrivals[coming].at)
            while coming < len(self.arrivals) and self.arrivals[coming].at <= self.now:
                self._admit(self.arrivals[coming])
                coming, changed = coming + 1, True
            if changed or (self.policy.name in _BY_TIME and len(self.history) % COUNT_ANEW == 0):
                jobs = [one.seen(self.now, self.rules.seconds) for one in self.present.values()]
                allocation = allocate(self._with_what_is_left(jobs), jobs, self.cluster)
                jobs = blind(jobs, self.cluster) if self.policy.blind else jobs
                self.ledger.renew(self.rules)
            changed, ran = self._round(allocation, jobs)
            idle = 0 if ran else idle + 1
            if idle > _MOST_IDLE or len(self.history) > _MOST_ROUNDS:
                raise ConfigError(
                    f"{len(self.present)} jobs are not done after {_MOST_ROUNDS} rounds; fewer, or more GPUs"
                )
        last = max(self.finished[name].finished for name in wanted)
        gpus = self.cluster.counts
        total = sum(self.busy.values())
        return SimulationReport(
            jobs=tuple(self.finished[self.arrivals[number].name] for number in looked_at),
            seconds=last,
            used={kind: self.busy.get(kind, 0.0) / (gpus[kind] * last) for kind in gpus},
            cost=self._cost(),
            moving=self.lost / total if total else 0.0,
            history=tuple(self.history),
        )

    def _check_lengths(self) -> None:
        """Raises: ConfigError for a job that cannot be done in as many rounds as are simulated."""
        for arrival in self.arrivals:
            best = max((option.rate for option in arrival.options), default=0.0)
            least = (arrival.start_seconds + arrival.work / best) / self.rules.seconds if best else 0.0
            if least > _MOST_ROUNDS:
                raise ConfigError(
                    f"job {arrival.name} takes at least {least:.3g} rounds of {self.rules.seconds:g} s, and only "
                    f"{_MOST_ROUNDS} are simulated; make rounds longer, or mend its work, its rates or its start"
                )

    def _cost(self) -> float:
        return sum(self.busy.get(kind.name, 0.0) * kind.price for kind in self.cluster.kinds) / _HOUR

    def _with_what_is_left(self, jobs: Sequence[Job]) -> Policy:
        """Returns the policy with the rest of its budget: at least what the work costs that is still to be done."""
        spent = self._cost()
        if self.policy.budget is None or not spent:
            return self.policy
        prices = {kind.name: kind.price for kind in self.cluster.kinds}
        least = sum(
            job.work * min(prices[o.kind] * o.gpus / o.rate for o in job.options if o.kind in prices and o.rate > 0)
            for job in jobs
        )
        return replace(self.policy, budget=max(self.policy.budget - spent, least / _HOUR))

    def _admit(self, arrival: Arrival) -> None:
        if arrival.name in self.present or arrival.name in self.finished:
            raise ConfigError(f"two jobs have the name {arrival.name}; give each its own")
        job = Job(name=arrival.name, options=arrival.options)
        self.present[arrival.name] = _Present(arrival, average_rate(job, self.cluster), most_gpus(job), arrival.work)

    def _round(self, allocation: Allocation, jobs: Sequence[Job]) -> tuple[bool, bool]:
        """Runs one; returns whether a new allocation is needed, and whether anybody ran."""
        seconds = self.rules.seconds
        running = {
            name: Running(one.place, one.since, one.move_seconds)
            for name, one in self.present.items()
            if one.place is not None
        }
        placed = place(allocation, jobs, self.cluster, self.ledger, running, self.rules, self._probes())
        used = dict.fromkeys((kind.name for kind in self.cluster.kinds), 0)
        weights = sum(one.arrival.weight for one in self.present.values())
        changed = False
        for name, one in list(self.present.items()):
            one.enter(placed.get(name))
            alone = one.alone_rate(one.arrival.weight / weights * self.cluster.gpus)
            if one.place is None:
                one.wait(alone * seconds)
                continue
            known = len(one.measured)
            spent, lost = one.run(seconds)
            one.wait(alone * spent)
            used[one.place.kind] += one.place.gpus
            self.busy[one.place.kind] = self.busy.get(one.place.kind, 0.0) + spent * one.place.gpus
            self.lost += lost * one.place.gpus
            changed |= len(one.measured) > known
            if one.left <= 0.0:
                self._finish(one, self.now + spent)
                changed = True
        self.ledger.enter(allocation, placed, seconds)
        for name in placed.keys() - self.present.keys():
            self.ledger.forget(name)
        self.history.append((self.now, used, len(self.present) - len(placed.keys() & self.present.keys())))
        self.now += seconds
        return changed, bool(placed)

    def _finish(self, one: _Present, now: float) -> None:
        arrival = one.arrival
        self.finished[arrival.name] = Outcome(
            name=arrival.name,
            group=arrival.group,
            arrived=arrival.at,
            finished=now,
            fairness=one.alone / arrival.work,
            moves=one.moves,
            late=now > arrival.at + arrival.deadline,
        )
        del self.present[arrival.name]

    def _probes(self) -> dict[str, Place]:
        """Returns what is tried in the next round: one place for each job whose rates are not settled."""
        found, gpus = {}, self.cluster.counts
        for name, one in self.present.items():
            option = probe(estimate(one.arrival.predicted, one.measured), gpus) if one.arrival.predicted else None
            if option is not None:
                found[name] = Place((name,), option.kind, option.gpus)
        return found


_POINTS = 400
"""Of the curve of used GPUs: rounds are put together to so many at most."""


def draw(reports: Mapping[str, SimulationReport], gpus: Mapping[str, int], path: Path) -> None:
    """Draws a curve for each report to a file, PNG, SVG or PDF by its suffix.

    Args:
        reports: by their names in the legend.
        gpus: GPUs of the simulated cluster, of all kinds together, by the same names.

    Raises: ConfigError if matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib, which is not installed: pip install 'fold3d[draw]'") from None
    figure = Figure(figsize=(13, 3.8), dpi=110, layout="constrained")
    done, used, fair = figure.subplots(1, 3)
    for label, report in reports.items():
        _steps(done, [job.seconds / _HOUR for job in report.jobs], label)
        _steps(fair, [job.fairness for job in report.jobs], label)
        step = -(-len(report.history) // _POINTS)
        parts = [report.history[first : first + step] for first in range(0, len(report.history), step)]
        means = [sum(sum(busy.values()) for _, busy, _ in part) / len(part) for part in parts]
        used.plot([part[0][0] / _HOUR for part in parts], [100.0 * one / gpus[label] for one in means], lw=1.2)
    done.set(xlabel="hours from arrival to end", ylabel="jobs that were faster, %", ylim=(0, 101))
    done.legend(fontsize=8, loc="lower right")
    used.set(xlabel="hours", ylabel="GPUs in use, %", ylim=(0, 101))
    fair.axvline(1.0, color="#888888", lw=0.8, ls="--")
    fair.set(xlabel="time over that with an equal part (1: fair)", ylabel="jobs below, %", ylim=(0, 101))
    try:
        figure.savefig(path, format=path.suffix[1:])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def _steps(axes: Axes, values: Sequence[float], label: str) -> None:
    shares = [100.0 * (number + 1) / len(values) for number in range(len(values))]
    axes.step([0.0, *sorted(values)], [0.0, *shares], where="post", label=label, lw=1.2)
