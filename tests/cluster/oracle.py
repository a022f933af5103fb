"""Small linear programs solved by trying every vertex, and the policies' programs written down a second time."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from fold3d.cluster.jobs import Cluster, Job, Option, average_rate

GAVEL = ((40.0, 10.0), (12.0, 4.0), (100.0, 50.0))
"""The example of the dissertation, 5.4.1: steps per second of three jobs on a V100 and a K80."""


def jobs_of(*rates: tuple[float, ...], kinds: str = "vpk", gpus: int = 1, **fields: tuple) -> list[Job]:
    """Returns jobs 0, 1, .. with the rates on each kind; fields such as `work=(1.0, 2.0)` are given one by one."""
    return [
        Job(
            name=str(number),
            options=tuple(Option(kind, gpus, rate) for kind, rate in zip(kinds, row, strict=False)),
            **{field: values[number] for field, values in fields.items()},
        )
        for number, row in enumerate(rates)
    ]


def best_vertex(goal: np.ndarray, matrix: np.ndarray, limits: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the largest `goal @ x` with `matrix @ x <= limits` and `x >= 0`, and x: of all vertices, the best."""
    count = len(goal)
    rows = np.concatenate([matrix, -np.eye(count)])
    ends = np.concatenate([limits, np.zeros(count)])
    chosen = np.array(list(combinations(range(len(rows)), count)))
    systems = rows[chosen]
    regular = np.abs(np.linalg.det(systems)) > 1e-9
    points = np.linalg.solve(systems[regular], ends[chosen[regular]][..., None])[..., 0]
    possible = points[(points @ rows.T <= ends + 1e-7).all(axis=1)]
    values = possible @ goal
    return float(values.max()), possible[values.argmax()]


class Problem:
    """Time of each job on each kind, one GPU a job: x[job * kinds + kind], and room for one more variable."""

    def __init__(self, jobs: list[Job], cluster: Cluster) -> None:
        self.rates = np.array([[option.rate for option in job.options] for job in jobs])
        count, kinds = self.rates.shape
        self.size = count * kinds
        self.norm = np.array([average_rate(job, cluster) for job in jobs])
        self.prices = np.tile([kind.price for kind in cluster.kinds], count)
        rows = [*np.kron(np.eye(count), np.ones(kinds)), *np.kron(np.ones(count), np.eye(kinds))]
        self.matrix = np.array([[*row, 0.0] for row in rows])
        self.limits = np.array([1.0] * count + [float(kind.gpus) for kind in cluster.kinds])

    def rate(self, job: int) -> np.ndarray:
        """Returns the coefficients of a job's throughput, in average GPUs."""
        row = np.zeros(self.size + 1)
        kinds = self.rates.shape[1]
        row[job * kinds : (job + 1) * kinds] = self.rates[job] / self.norm[job]
        return row

    def solve(self, goal: np.ndarray, rows: list[np.ndarray], limits: list[float]) -> tuple[float, np.ndarray]:
        """Returns the best vertex under more rows."""
        return best_vertex(goal, np.array([*self.matrix, *rows]), np.array([*self.limits, *limits]))

    def rise(self, slopes: np.ndarray, bases: np.ndarray, budget: float | None = None) -> float:
        """Returns the largest d with throughputs of at least bases + slopes * d; `budget * d` bounds the price."""
        last = np.eye(self.size + 1)[-1]
        rows = [slope * last - self.rate(job) for job, slope in enumerate(slopes)]
        limits = list(-bases)
        if budget is not None:
            rows.append(np.array([*self.prices, -budget]))
            limits.append(0.0)
        return self.solve(last, rows, limits)[0]

    def leximin(self, weights: np.ndarray) -> np.ndarray:
        """Returns the max-min fair throughputs, found slowly: whoever cannot rise alone above the level is done."""
        done: dict[int, float] = {}
        while len(done) < len(weights):
            slopes = np.array([0.0 if job in done else weight for job, weight in enumerate(weights)])
            bases = np.array([done.get(job, 0.0) for job in range(len(weights))])
            level = self.rise(slopes, bases)
            floors = bases + slopes * level
            for job in (job for job in range(len(weights)) if job not in done):
                rows = [-self.rate(other) for other in range(len(weights)) if other != job]
                least = [-(1 - 1e-9) * floor for other, floor in enumerate(floors) if other != job]
                if self.solve(self.rate(job), rows, least)[0] < floors[job] * (1 + 1e-6):
                    done[job] = float(floors[job])
        return np.array([done[job] for job in range(len(weights))])
