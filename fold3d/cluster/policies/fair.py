"""Max-min fairness by water filling: `fair`, and `hierarchical`, with groups of jobs above it.

The level rises for all jobs at once, each by its weight, until some cannot have more; then for the others. What the
level asks of a job is bounded by what it gets when it runs on its best option all the time, so where GPUs are plenty
many jobs stop at many levels. These levels need no program each: the path of what all jobs are asked for is known in
advance, and a few programs find the last point of it that is possible.
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
_MOST_CUTS = 50
"""Usually 2 to 5 are needed."""


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
    """Returns the highest possible levels, who may still rise beyond them, and the program that found that out.

    Where the first job that has all it can use does not end the rise, the end is sought from above: the program for
    levels that are too high says by its dual values what the jobs can have at most, weighted by them. The highest
    levels with that sum are tried next (cutting planes along the path: few are needed, and the last one is exact).
    """
    stages = _path(program.most, base, active, weights)
    _, _, slope, length = stages[0]
    found = program.rise(base, slope)
    if found is None:
        raise RuntimeError("levels that were reached cannot be reached again")
    if found.value < length * (1.0 - _FULL) - _FULL:
        return base + slope * found.value, active, found
    number, level, active = len(stages) - 1, stages[-1][0], stages[-1][1]
    for _ in range(_MOST_CUTS):
        found = program.rise(np.zeros(len(base)), level)
        if found is None:
            raise RuntimeError("nobody can have anything")
        if found.value >= 1.0 - _FULL / 10.0:
            level = level * min(1.0, found.value)  # what is asked again must be possible
            break
        worth = found.prices[found.classes.of]
        most = found.value * float(worth @ level)
        while number and float(worth @ stages[number][0]) > most:
            number -= 1
        start, active, slope, length = stages[number]
        gain = float(worth @ slope)
        level = start + slope * min(length, max(0.0, (most - float(worth @ start)) / gain) if gain > 0 else length)
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
