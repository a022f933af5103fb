"""Max-min fairness by water filling: `fair`, and `hierarchical`, with groups of jobs above it.

The level rises for all jobs at once, each by its weight, until some cannot have more; then for the others. What the
level asks of a job is bounded by what it gets when it runs on its best option all the time, so where GPUs are plenty
many jobs stop at many levels. These levels need no program each: the path of what all jobs are asked for is known in
advance, and the last point of it that is possible is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fold3d.cluster.jobs import Job
from fold3d.cluster.policies.program import Flags, Program, Solution, Vector
from fold3d.errors import ConfigError

Weights = Callable[[Flags], Vector]
"""From the jobs that can have more to how fast the level rises for each: [jobs] -> [jobs]."""

_FULL = 1e-7
"""Of a level: less than that is rounding."""
_DUAL = 1e-7


@dataclass(frozen=True, slots=True)
class Group:
    """What the jobs of one group share."""

    weight: float = 1.0
    """Against other groups."""
    inside: str = "fair"
    """How its jobs share it: fair (by weight), or fifo (who came first gets all that is of use to it)."""

    def __post_init__(self) -> None:
        if not self.weight > 0 or self.inside not in ("fair", "fifo"):
            raise ConfigError(
                f"a group has weight {self.weight} and is {self.inside!r} inside: fair or fifo, and positive"
            )


def fair_weights(jobs: Sequence[Job]) -> Weights:
    """Returns those of `fair`: each job's own."""
    own = np.array([job.weight for job in jobs])
    return lambda active: np.where(active, own, 0.0)


def group_weights(jobs: Sequence[Job], groups: Mapping[str, Group]) -> Weights:
    """Returns those of `hierarchical`: a group's weight is divided among its jobs that can have more.

    Jobs of groups that are not named share as a group of weight 1.
    """
    own = np.array([job.weight for job in jobs])
    members: dict[str, list[int]] = {}
    for number in sorted(range(len(jobs)), key=lambda number: jobs[number].arrived):
        members.setdefault(jobs[number].group, []).append(number)

    def weights(active: Flags) -> Vector:
        given = np.zeros(len(jobs))
        for name, everybody in members.items():
            group = groups.get(name, Group())
            left = [number for number in everybody if active[number]]
            if left and group.inside == "fifo":
                given[left[0]] = group.weight
            elif left:
                given[left] = group.weight * own[left] / own[left].sum()
        return given

    return weights


def water_fill(program: Program, weights: Weights) -> Solution:
    """Returns the allocation with the largest least level, of those the one with the largest second least, etc."""
    plenty = program.everybody()
    if plenty is not None:
        return plenty
    count = len(program.most)
    base, active = np.zeros(count), np.ones(count, dtype=bool)
    exact = True
    while True:
        before = base
        base, active, reached = _climb(program, base, active, weights)
        asked = active & (weights(active) > 0)
        if not asked.any():
            break
        stuck = asked & (reached.prices[reached.classes.of] > _DUAL)
        if (stuck != asked).any():
            exact = False
            stuck = asked & ~program.improvable(base, asked)
        if not stuck.any() and np.allclose(base, before, rtol=_FULL, atol=_FULL):
            stuck = asked  # what they could gain is less than rounding
        active = active & ~stuck
        if not active.any():
            break
    # Gains that were too small to be found go to whoever can use them: nothing is left that anybody could have.
    final = None if exact else program.best(np.ones(count), base)
    return reached if final is None else final


def _climb(program: Program, base: Vector, active: Flags, weights: Weights) -> tuple[Vector, Flags, Solution]:
    """Returns the highest possible levels, who may still rise beyond them, and the program that found that out."""
    stages = _path(program.most, base, active, weights)
    first, found, last = 0, program.rise(base, stages[0][2]), len(stages) - 1
    if found is None:
        raise RuntimeError("levels that were reached cannot be reached again")
    # No program rises beyond a stage: its end is where a job has all that it can use. So one that reaches it may go on.
    while first < last and found.value >= stages[first][3] * (1.0 - _FULL) - _FULL:
        middle = (first + last + 1) // 2
        tried = program.rise(stages[middle][0], stages[middle][2])
        if tried is None:
            last = middle - 1
        else:
            first, found = middle, tried
    base, active, slope, length = stages[first]
    passed = found.value >= length * (1.0 - _FULL) - _FULL
    level = base + slope * (length if passed else found.value)
    return level, active & (level < program.most * (1.0 - _FULL)), found


def _path(most: Vector, base: Vector, active: Flags, weights: Weights) -> list[tuple[Vector, Flags, Vector, float]]:
    """Returns the stages of a rise that only the jobs' own limits end: (levels, who rises, how fast, how far)."""
    stages: list[tuple[Vector, Flags, Vector, float]] = []
    while True:
        slope = weights(active)
        rising = np.flatnonzero(slope)
        if not rising.size:
            return [*stages, (base, active, slope, 0.0)]
        length = float(((most[rising] - base[rising]) / slope[rising]).min())
        stages.append((base, active, slope, length))
        base = np.minimum(base + slope * length, most)
        full = active & (base >= most * (1.0 - _FULL))
        base = np.where(full, most, base)
        active = active & ~full
