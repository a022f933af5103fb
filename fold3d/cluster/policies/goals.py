"""Policies with one goal for all jobs: the makespan, the throughput, the cost, finish-time fairness."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fold3d.cluster.jobs import Cluster, Job, JobError, isolated_rates, most_gpus
from fold3d.cluster.policies.fair import water_fill
from fold3d.cluster.policies.program import Program, Solution, Vector
from fold3d.errors import ConfigError

_EXACT = 1e-6
"""Relative: of finish-time fairness, of budgets and deadlines."""
_PATIENCE = 0.01
"""`cost` does not wait for cheaper GPUs to save a smaller part than this."""
_FILLED = 1e-7
"""What the first goal gives up, relative, so that a second program can start from it."""


def makespan(program: Program, jobs: Sequence[Job], budget: float | None) -> Solution:
    """Returns the allocation under which all jobs are done soonest: throughputs in the ratio of what is left of each.

    One linear program for 1 / makespan; with a budget, too: cost x makespan <= budget is cost <= budget / makespan.

    Raises: ConfigError for a budget that is below what the work costs at least.
    """
    work = _work(program, jobs, "makespan") / 3600.0
    least = float(program.cheapest() @ work)
    if budget is not None and budget < least * (1.0 - _EXACT):
        raise ConfigError(
            f"the budget is {budget:g}, but the work costs {least:.6g} where it is cheapest; set it higher"
        )
    found = _reached(program.rise(np.zeros(len(jobs)), work, budget=budget))
    if budget is not None:
        return found
    return _filled(program, found, work * found.value)


def throughput(program: Program) -> Solution:
    """Returns the allocation with the largest sum of throughputs, in average GPUs: different jobs have one unit."""
    return _reached(program.best(np.ones(len(program.most)), np.zeros(len(program.most))))


def cost(program: Program, jobs: Sequence[Job]) -> tuple[Solution, tuple[str, ...]]:
    """Returns the allocation that does the work for the least money while deadlines are met, and who will be late.

    A job waits for the option on which its work is cheapest, unless its deadline asks for more. Where deadlines cannot
    all be met, those that are in the way of each other are missed by the same part of their time.
    """
    due = np.array([job.work / job.deadline if math.isfinite(job.deadline) else 0.0 for job in jobs]) / program.norm
    if not np.isfinite(due).all():
        (name, *_) = [job.name for job, rate in zip(jobs, due, strict=True) if not math.isfinite(rate)]
        raise JobError(name, f"job {name} has a deadline, but nobody has said how much work is left of it")
    late: tuple[str, ...] = ()
    if due.any():
        wanted = np.minimum(due, program.most)
        part = _reached(program.rise(np.zeros(len(jobs)), wanted)).value
        short = due > program.most
        if part < 1.0:
            wanted = np.minimum(wanted, _filled_up(program, wanted))
            short |= wanted < due * (1.0 - _EXACT)
        due = wanted * (1.0 - _FILLED)
        late = tuple(job.name for job, missed in zip(jobs, short, strict=True) if missed)
    return _reached(program.best(program.cheapest() * (1.0 + _PATIENCE) + _FILLED, due, price=1.0)), late


def _filled_up(program: Program, wanted: Vector) -> Vector:
    """Returns throughputs of which the least part of what is wanted is largest, then the second least, and so on."""
    return program.throughput(water_fill(program, lambda active: np.where(active, wanted, 0.0)))


def finish_time(program: Program, jobs: Sequence[Job], cluster: Cluster) -> Solution:
    """Returns the allocation under which the worst ratio is least of when a job ends to when it would end with its part
    of the cluster for itself (Themis's finish-time fairness; weights count).
    """
    work = _work(program, jobs, "finish_time")
    alone = work / (np.array(isolated_rates(jobs, cluster)) / program.norm)
    ends = np.array([job.isolated for job in jobs]) + alone
    passed = np.array([job.elapsed for job in jobs])

    def asked(ratio: float) -> Vector:
        needed: Vector = work / (ratio * ends - passed)
        return needed

    def possible(ratio: float) -> tuple[float, Solution]:
        found = _reached(program.rise(np.zeros(len(jobs)), asked(ratio)))
        return found.value, found

    # With all of the cluster for itself a job cannot be faster than this.
    low = float(((passed + work / program.most) / ends).max())
    if not passed.any():
        part, found = possible(low)
        return _filled(program, found, asked(low) * part)
    high = low
    part, _ = possible(high)
    if part < 1.0:
        high = high / part * (1.0 + _EXACT)
    while high - low > _EXACT * high:
        middle = (low + high) / 2.0
        part, _ = possible(middle)
        if part >= 1.0:
            high = middle
        else:
            # Asking everybody for that part of it, or for less, is possible.
            low, high = middle, min(high, middle / part * (1.0 + _EXACT))
    return _filled(program, possible(high)[1], asked(high))


def ordered(program: Program, jobs: Sequence[Job], *, shortest: bool) -> Solution:
    """Returns the allocation of `fifo` or `shortest`: throughput relative to the fastest option, weighted by turn.

    The job whose turn is first counts as many times as there are jobs, the last once; GPUs count, so that one job on
    eight is worth eight on one. `shortest` goes by the time on the fastest option, and gives that to the first job
    whatever it takes from others.
    """
    fastest = np.array([job.work for job in jobs]) / program.norm / program.most if shortest else None
    if fastest is not None and not np.isfinite(fastest).all():
        _work(program, jobs, "shortest")
    keys = fastest if fastest is not None else np.array([job.arrived for job in jobs])
    turn = np.empty(len(jobs))
    turn[np.argsort(keys, kind="stable")] = np.arange(len(jobs))
    value = (len(jobs) - turn) * np.array([most_gpus(job) for job in jobs]) / program.most
    base = np.zeros(len(jobs))
    if shortest:
        base[turn == 0] = program.most[turn == 0] * (1.0 - _FILLED)
    return _reached(program.best(value, base))


def _work(program: Program, jobs: Sequence[Job], policy: str) -> Vector:
    """Returns what is left of each job, in seconds on an average GPU. Raises: ConfigError where it is not known."""
    for job in jobs:
        if not math.isfinite(job.work):
            needs = f"the policy {policy} needs to know how much work is left, which nobody has said of {job.name}"
            raise JobError(job.name, f"{needs}; take another policy until it is known")
    return np.array([job.work for job in jobs]) / program.norm


def _filled(program: Program, found: Solution, base: Vector) -> Solution:
    """Returns an allocation that gives all jobs `base`, and what else there is to whoever has use for it."""
    return program.best(np.ones(len(base)), base * (1.0 - _FILLED)) or found


def _reached(found: Solution | None) -> Solution:
    if found is None:
        raise RuntimeError("a program that has a solution was found to have none")
    return found
