"""The linear programs of all policies: who may have how much time on what, solved by scipy's HiGHS.

A variable is the part of the time that a job spends on one of its options. Throughputs are in average GPUs of the
cluster (`jobs.average_rate`). Jobs that a program cannot tell apart become one, with a count; their time is shared
equally. Since the programs are convex, that loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fold3d.cluster.jobs import Cluster, Job, JobError, Pair, Place, Share, average_rate
from fold3d.errors import ConfigError

Vector = NDArray[np.float64]
Flags = NDArray[np.bool_]

_STRETCH = 1e4
"""An improvement of a throughput by less than about half of 1 / this is none."""
_SLACK = 1e-9
"""What was reached by one program is asked of the next but for this part: it was reached up to rounding."""
_INTERIOR = 600
"""From so many variables on the interior point method is faster than the simplex method (measured: 2 times at 1500)."""
_DENSE = 20_000
"""Programs of so few coefficients are handed over as dense matrices: making a sparse one takes longer than solving."""
_OPTIMAL, _INFEASIBLE = 0, 2
"""Of scipy's `status`."""
_NEAR_ZERO = 1e-9


@dataclass(frozen=True)
class _Classes:
    """Jobs that a program cannot tell apart."""

    first: NDArray[np.intp]
    """A job of each class."""
    of: NDArray[np.intp]
    """The class of each job."""
    count: Vector


@dataclass(frozen=True)
class Solution:
    """An optimum."""

    value: float
    classes: _Classes
    time: Vector
    """Of all jobs of a class, on each option, class by class; then of each pair."""
    prices: Vector
    """How much the optimum would gain if the class needed less (dual values)."""


class Program:
    """The jobs, options and GPUs that are the same in all programs of a policy."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, pairs: Sequence[Pair] = ()) -> None:
        """Args:
            pairs: of jobs that may share GPUs; jobs are not put together into classes then.

        Raises: ConfigError for jobs that run nowhere, names that occur twice, pairs of unknown jobs; without scipy.
        """
        self._scipy = _load()
        self._jobs, self._cluster = jobs, cluster
        kinds = {kind.name: number for number, kind in enumerate(cluster.kinds)}
        names = {job.name: number for number, job in enumerate(jobs)}
        if len(names) < len(jobs):
            raise ConfigError("two jobs have one name; give each its own")
        self.norm = np.empty(len(jobs))
        """Work per second of each job on an average GPU."""
        self.most = np.empty(len(jobs))
        """The throughput of each job that has its best option all the time, in average GPUs."""
        self._shape = np.empty(len(jobs), dtype=np.intp)
        self._usable: list[tuple[int, ...]] = []  # of each shape: which of the job's options
        self._kind: list[NDArray[np.intp]] = []
        self._gpus: list[Vector] = []
        self._rate: list[Vector] = []
        known: dict[Any, int] = {}
        cached: dict[Any, tuple[int, float, float]] = {}
        for number, job in enumerate(jobs):
            if job.options not in cached:
                usable = tuple(
                    place
                    for place, one in enumerate(job.options)
                    if one.rate > 0 and one.kind in kinds and one.gpus <= cluster.kinds[kinds[one.kind]].gpus
                )
                if not usable:
                    asked = ", ".join(f"{one.kind} x{one.gpus} at {one.rate:g}" for one in job.options) or "nothing"
                    there = ", ".join(f"{kind.name} x{kind.gpus}" for kind in cluster.kinds)
                    raise JobError(
                        job.name, f"job {job.name} can run nowhere here: it asks for {asked}; there are {there}"
                    )
                norm = average_rate(job, cluster)
                chosen = [job.options[place] for place in usable]
                key = (usable, tuple((one.kind, one.gpus, f"{one.rate / norm:.12g}") for one in chosen))
                if key not in known:
                    known[key] = len(known)
                    self._usable.append(usable)
                    self._kind.append(np.array([kinds[one.kind] for one in chosen], dtype=np.intp))
                    self._gpus.append(np.array([float(one.gpus) for one in chosen]))
                    self._rate.append(np.array([one.rate / norm for one in chosen]))
                cached[job.options] = known[key], norm, max(one.rate for one in chosen) / norm
            self._shape[number], self.norm[number], self.most[number] = cached[job.options]
        self._pairs = [
            (names[pair.jobs[0]], names[pair.jobs[1]], kinds[pair.kind], pair)
            for pair in pairs
            if pair.kind in kinds and set(pair.jobs) <= set(names)
        ]
        for a, b, _, pair in self._pairs:
            self.most[a] = max(self.most[a], pair.rates[0] / self.norm[a])
            self.most[b] = max(self.most[b], pair.rates[1] / self.norm[b])
        self._counts = np.array([float(kind.gpus) for kind in cluster.kinds])
        self._price = np.array([kind.price for kind in cluster.kinds])

    def rise(self, base: Vector, slope: Vector, *, budget: float | None = None) -> Solution | None:
        """Returns the largest d with `throughput >= base + slope * d` for all jobs; None if not even d = 0 is possible.

        Args:
            base, slope: [jobs], in average GPUs.
            budget: the GPUs cost at most `budget * d` an hour.
        """
        classes = self._classes(base, slope)
        table = _Table(self, classes, wanted=(base + slope)[classes.first] > 0)
        base, slope = base[classes.first], slope[classes.first]
        scale = float(slope.max()) or 1.0
        rising = np.flatnonzero(slope)
        column = table.variable()
        for number in map(int, rising):
            table.put("needs", number, column, classes.count[number] * slope[number] / scale)
        if budget is not None:
            table.put("budget", 0, column, -budget / scale)
        bounds = {column: (0.0, np.inf if rising.size else 1.0)}
        return table.maximise({column: 1.0}, bounds, base, scale, costs=budget is not None)

    def improvable(self, base: Vector, asked: Flags) -> Flags:
        """Returns which of the jobs that are asked can have more than `base` while nobody has less than that.

        Those that can can all at once (the mean of the allocations that show it does), so one linear program finds
        them: an allocation and `base` are stretched by a common factor until each of them has gained 1. Gavel takes a
        mixed-integer program.
        """
        unit = float(base[asked].max()) or 1.0
        classes = self._classes(base, asked.astype(float))
        table = _Table(self, classes, wanted=(base > 0)[classes.first] | asked[classes.first])
        base, members = base[classes.first] / unit, asked[classes.first]
        factor = table.variable()
        table.stretch(factor, unit)
        for number in map(int, np.flatnonzero(base)):
            table.put("needs", number, factor, classes.count[number] * base[number] * (1.0 - _SLACK))
        gains = {int(number): table.variable() for number in np.flatnonzero(members)}
        for number, column in gains.items():
            table.put("needs", number, column, classes.count[number])
        bounds = dict.fromkeys(gains.values(), (0.0, 1.0)) | {factor: (1.0, _STRETCH)}
        value = {column: classes.count[number] for number, column in gains.items()}
        found = table.maximise(value, bounds, np.zeros(len(base)), 1.0, extra=True)
        gained = np.zeros(len(base), dtype=bool)
        if found is not None:
            for number, column in gains.items():
                gained[number] = found.time[column] > 0.5
        return gained[classes.of] & asked

    def best(self, value: Vector, base: Vector, *, price: float = 0.0) -> Solution | None:
        """Returns the largest sum of `value * throughput`, less `price` times what the GPUs cost an hour.

        Args:
            value: [jobs].
            base: [jobs], throughputs that all keep. None is returned where they cannot.
        """
        classes = self._classes(base, value)
        table = _Table(self, classes, wanted=None)
        worth = table.rates * value[classes.first][table.owner] - price * table.gpus * self._price[table.kind]
        for a, b, kind, pair in self._pairs:
            rates = pair.rates[0] / self.norm[a] * value[a] + pair.rates[1] / self.norm[b] * value[b]
            worth = np.append(worth, rates - price * pair.gpus * self._price[kind])
        return table.maximise(dict(enumerate(worth)), {}, base[classes.first], 1.0)

    def everybody(self) -> Solution | None:
        """Returns the allocation in which all jobs have their best options all the time; None where that cannot be."""
        classes = self._classes(np.zeros(len(self._jobs)))
        time: list[Vector] = []
        used = np.zeros(len(self._counts))
        for shape, count in zip(self._shape[classes.first], classes.count, strict=True):
            best = int(np.argmax(self._rate[shape]))
            used[self._kind[shape][best]] += count * self._gpus[shape][best]
            time.append(np.where(np.arange(len(self._rate[shape])) == best, count, 0.0))
        if self._pairs or (used > self._counts).any():
            return None
        return Solution(0.0, classes, np.concatenate(time), np.zeros(len(time)))

    def cheapest(self) -> Vector:
        """Returns the least that each job's work costs: per hour on an average GPU. [jobs]"""
        costs = [
            float((self._gpus[s] * self._price[self._kind[s]] / self._rate[s]).min()) for s in range(len(self._rate))
        ]
        return np.array(costs)[self._shape]

    def shares(self, solution: Solution) -> tuple[Share, ...]:
        """Returns the solution job by job."""
        found = []
        classes = solution.classes
        lengths = [len(self._rate[shape]) for shape in self._shape[classes.first]]
        begin = np.concatenate([[0], np.cumsum(lengths)])
        for number, job in enumerate(self._jobs):
            of = classes.of[number]
            for offset, place in enumerate(self._usable[self._shape[number]]):
                time = solution.time[begin[of] + offset] / classes.count[of]
                if time > _NEAR_ZERO:
                    option = job.options[place]
                    here = Place((job.name,), option.kind, option.gpus)
                    found.append(Share(here, (option.rate,), min(1.0, float(time))))
        for offset, (_, _, _, pair) in enumerate(self._pairs):
            time = solution.time[begin[-1] + offset]
            if time > _NEAR_ZERO:
                found.append(Share(Place(pair.jobs, pair.kind, pair.gpus), pair.rates, min(1.0, float(time))))
        return tuple(found)

    def throughput(self, solution: Solution) -> Vector:
        """Returns each job's throughput in average GPUs."""
        got = {job.name: 0.0 for job in self._jobs}
        for share in self.shares(solution):
            for name, rate in zip(share.place.jobs, share.rates, strict=True):
                got[name] += rate * share.time
        return np.array(list(got.values())) / self.norm

    def _classes(self, *keys: Vector) -> _Classes:
        if self._pairs:
            every = np.arange(len(self._jobs))
            return _Classes(every, every, np.ones(len(every)))
        # Rounded to 12 digits: what was computed from equal numbers in another order is equal.
        table = np.stack([self._shape.astype(float), *(_rounded(key) for key in keys)], axis=1)
        _, first, of, count = np.unique(table, axis=0, return_index=True, return_inverse=True, return_counts=True)
        return _Classes(first, of.reshape(-1), count.astype(float))


class _Table:
    """One program while it is written: rows for kinds of GPU, the time of jobs, what jobs need, and a budget."""

    def __init__(self, program: Program, classes: _Classes, *, wanted: Flags | None) -> None:
        """Args:
        wanted: [classes], which of them get time at all; None for all.
        """
        self._program, self._classes = program, classes
        shapes = program._shape[classes.first]
        lengths = [len(program._rate[shape]) for shape in shapes]
        self.owner = np.repeat(np.arange(len(shapes)), lengths)
        self.kind = np.concatenate([program._kind[shape] for shape in shapes])
        self.gpus = np.concatenate([program._gpus[shape] for shape in shapes])
        self.rates = np.concatenate([program._rate[shape] for shape in shapes])
        self._columns = self._given = len(self.owner) + len(program._pairs)
        self._idle = np.zeros(self._columns, dtype=bool)
        if wanted is not None and not program._pairs:
            self._idle[:] = ~wanted[self.owner]
        first = {"kinds": 0, "time": len(program._counts)}
        first["needs"] = first["time"] + len(shapes)
        first["budget"] = first["needs"] + len(shapes)
        self._first = first
        columns = np.arange(len(self.owner))
        self._rows = [self.kind, first["time"] + self.owner, first["needs"] + self.owner]
        self._places = [columns, columns, columns]
        self._values = [self.gpus, np.ones(len(columns)), -self.rates]
        self._more: list[tuple[int, int, float]] = []
        for offset, (a, b, kind, pair) in enumerate(program._pairs, len(columns)):
            self._more.append((kind, offset, float(pair.gpus)))
            for job, rate in ((a, pair.rates[0]), (b, pair.rates[1])):
                self._more.append((first["time"] + job, offset, 1.0))
                self._more.append((first["needs"] + job, offset, -rate / program.norm[job]))
        self._limits = np.concatenate([program._counts, classes.count])

    def variable(self) -> int:
        """Returns the column of one more variable."""
        self._columns += 1
        return self._columns - 1

    def put(self, rows: str, row: int, column: int, value: float) -> None:
        """Enters a coefficient."""
        self._more.append((self._first[rows] + row, column, float(value)))

    def stretch(self, factor: int, unit: float) -> None:
        """Multiplies all limits by the variable `factor`. Throughputs are counted in `unit`s from here on."""
        self._more += [(row, factor, -float(limit)) for row, limit in enumerate(self._limits)]
        self._limits = np.zeros(len(self._limits))
        self._values[2] = self._values[2] / unit
        needs = self._first["needs"]
        self._more = [(r, c, v / unit if r >= needs and c < self._given else v) for r, c, v in self._more]

    def maximise(
        self,
        value: dict[int, float],
        bounds: dict[int, tuple[float, float]],
        base: Vector,
        scale: float,
        *,
        costs: bool = False,
        extra: bool = False,
    ) -> Solution | None:
        """Returns the optimum, None where there is none.

        Args:
            value: of the variables, those of no value left out.
            base: [classes], what each job needs whatever happens.
            scale: of the value that is returned.
            costs: whether there is a budget, to which the GPUs add.
            extra: whether the solution has the values of all variables, not only time.
        """
        program, classes = self._program, self._classes
        rows, places, values = list(self._rows), list(self._places), list(self._values)
        if self._more:
            more = np.array(self._more)
            rows.append(more[:, 0].astype(np.intp))
            places.append(more[:, 1].astype(np.intp))
            values.append(more[:, 2])
        height = self._first["budget"] + costs
        limits = np.concatenate([self._limits, -classes.count * base * (1.0 - _SLACK), np.zeros(int(costs))])
        if costs:
            rows.append(np.full(len(self.owner), self._first["budget"]))
            places.append(np.arange(len(self.owner)))
            values.append(self.gpus * program._price[self.kind])
        where = np.concatenate(rows), np.concatenate(places)
        matrix: Any
        if height * self._columns > _DENSE:
            matrix = program._scipy.sparse.csr_array((np.concatenate(values), where), shape=(height, self._columns))
        else:
            matrix = np.zeros((height, self._columns))
            np.add.at(matrix, where, np.concatenate(values))
        goal, low, high = np.zeros(self._columns), np.zeros(self._columns), np.full(self._columns, np.inf)
        goal[list(value)] = list(value.values())
        high[: self._given][self._idle] = 0.0
        for column, (lower, upper) in bounds.items():
            low[column], high[column] = lower, upper
        found: Any = None
        for method in ("highs-ipm", "highs-ds") if self._columns > _INTERIOR else ("highs-ds", "highs-ipm"):
            found = program._scipy.optimize.linprog(
                -goal, A_ub=matrix, b_ub=limits, bounds=np.stack([low, high], axis=1), method=method
            )
            if found.status in (_OPTIMAL, _INFEASIBLE):
                break  # else one of them could not tell: at the edge of what is possible
        if found.status != _OPTIMAL:
            return None
        duals = -found.ineqlin.marginals[self._first["needs"] : self._first["budget"]]
        time = found.x if extra else found.x[: self._given]
        return Solution(float(-found.fun) / scale, classes, time, duals)


def _rounded(values: Vector) -> Vector:
    """Returns the values with 12 digits."""
    with np.errstate(divide="ignore"):
        digits = np.where(values == 0, 0.0, np.floor(np.log10(np.abs(values))))
    unit = 10.0 ** (digits - 11)
    rounded: Vector = np.round(values / unit) * unit
    return rounded


def _load() -> Any:
    """Returns scipy, with the parts that are used. Raises: ConfigError where it is not installed."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError:
        raise ConfigError("policies need scipy, which is not installed: pip install 'fold3d[cluster]'") from None
    return scipy
