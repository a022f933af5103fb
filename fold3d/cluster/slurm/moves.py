"""A round on Slurm: who runs where, and the few commands that make it so.

A move is `sbatch --dependency=afterany:OLD` of all that start, each behind its own old job, and then `scancel OLD..` of
all that end. If that is cut off between the two, the old jobs run on and the new ones wait; the next round sees both
and ends the old ones. Nobody waits behind the old job of another: if Slurm refuses that one's move, it runs on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fold3d.cluster.jobs import Allocation, Cluster, Job, JobError, Option, Place, isolated_rates
from fold3d.cluster.policies import Policy, allocate
from fold3d.cluster.rates import Estimate, Measured, estimate, probe
from fold3d.cluster.rounds import Rules, Running, place
from fold3d.cluster.slurm import commands
from fold3d.cluster.slurm.commands import COMMENT, Queued, options, script
from fold3d.cluster.slurm.folder import Folder, Wish
from fold3d.errors import ConfigError

_LATEST = 3
"""Rounds: what has not been entered for longer is not: nobody held rounds meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueState:
    """What there is before a round."""

    wishes: tuple[Wish, ...]
    """Of jobs that have not ended."""
    ended: tuple[tuple[Wish, str], ...]
    """Of the others, with how."""
    left_out: dict[str, str]
    """Jobs whose files cannot be used, and why."""
    queued: dict[str, list[Queued]]
    """By the names of jobs that have not ended."""
    measured: dict[str, Measured]
    """By the names of wishes."""
    estimates: dict[str, dict[Option, Estimate]]

    def place_of(self, wish: Wish) -> Place | None:
        """Returns where a job is, or waits to be."""
        mine = self.queued.get(wish.name)
        found = mine and next((on for on in wish.on if mine[-1].comment == f"{COMMENT}{on}"), None)
        return Place((wish.name,), found.kind, found.gpus) if found else None

    def taken(self, names: Collection[str]) -> list[Place]:
        """Returns the GPUs that these jobs have now."""
        running = [job for name in names for job in self.queued.get(name, []) if job.state != "PENDING"]
        found = [(job.name, re.fullmatch(rf"{COMMENT}([\w.-]+):(\d+)x(\d+)", job.comment)) for job in running]
        return [Place((name,), on[1], int(on[2]) * int(on[3])) for name, on in found if on]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a round has done."""

    placed: dict[str, Place]
    """Where they are now."""
    moved: int
    """How many were started or moved."""
    left_out: dict[str, str]
    """Those that were left as they are, and why."""


def look(folder: Folder) -> QueueState:
    """Returns what there is. Raises: ConfigError where Slurm does not answer."""
    wishes, ended = [], []
    measured: dict[str, Measured] = {}
    estimates: dict[str, dict[Option, Estimate]] = {}
    found, left_out = folder.wishes()
    for wish in found:
        try:
            how = folder.ended(wish.name)
            if how is not None:
                ended.append((wish, how))
                continue
            measured[wish.name] = wish.measured()
            estimates[wish.name] = estimate(wish.options, measured[wish.name].rates)
            wishes.append(wish)
        except ConfigError as error:
            left_out[wish.name] = str(error)
    names = {wish.name for wish in wishes} | left_out.keys()
    queued: dict[str, list[Queued]] = {}
    for job in commands.queue():
        if job.name in names and job.comment.startswith(COMMENT):
            queued.setdefault(job.name, []).append(job)
    return QueueState(
        wishes=tuple(wishes),
        ended=tuple(ended),
        left_out=left_out,
        queued=queued,
        measured=measured,
        estimates=estimates,
    )


def hold(folder: Folder, policy: Policy, cluster: Cluster, rules: Rules) -> Held:
    """Holds one round. A job that cannot be placed, or that Slurm refuses, is left as it is; the others go on.

    Raises: ConfigError where another round is in progress, or where Slurm does not answer.
    """
    with folder.locked():
        state, now = look(folder), time.time()
        names = {wish.name for wish in state.wishes} | state.left_out.keys()
        jobs, free, allocation, left_out = _due(policy, cluster, state, now)
        ledger, until = folder.ledger()
        before = {wish.name: here for wish in state.wishes if (here := state.place_of(wish)) is not None}
        active = {name: here for name, here in before.items() if state.queued[name][-1].state == "RUNNING"}
        passed = max(0.0, min(now - until, _LATEST * rules.seconds)) if until else 0.0
        ledger.enter(allocation, active, passed)
        for name in {name for here in ledger.debts for name in here.jobs} - names:
            ledger.forget(name)
        ledger.renew(rules)
        folder.keep(ledger, now)
        kept = [job.name for job in jobs]
        running = {name: _running(state, name, before[name]) for name in kept if name in before}
        placed = place(allocation, jobs, free, ledger, running, rules, _probes(state, free)) if free else {}
        wishes = [wish for wish in state.wishes if wish.name in kept]
        moved, refused = _move(folder, state, wishes, placed)
        for name in refused:
            del placed[name]
        placed |= {name: before[name] for name in refused if name in before}
        return Held(placed=placed, moved=moved, left_out=left_out | refused)


def _due(
    policy: Policy, cluster: Cluster, state: QueueState, now: float
) -> tuple[list[Job], Cluster | None, Allocation, dict[str, str]]:
    """Returns the jobs that can be placed, the GPUs that are left for them, what they are due, and who is left out."""
    left_out, every = dict(state.left_out), [_job(wish, state, now) for wish in state.wishes]
    while True:
        free = cluster.without(state.taken(left_out.keys()))
        jobs = [job for job in every if job.name not in left_out]
        if free is None or not jobs:
            return jobs, free, Allocation(()), left_out
        done = [state.measured[job.name].done for job in jobs]
        jobs = [
            replace(job, isolated=work / rate if rate else 0.0)
            for job, work, rate in zip(jobs, done, isolated_rates(jobs, free), strict=True)
        ]
        try:
            return jobs, free, allocate(policy, jobs, free), left_out
        except JobError as error:
            left_out[error.job] = str(error)


def _job(wish: Wish, state: QueueState, now: float) -> Job:
    measured, known = state.measured[wish.name], state.estimates[wish.name]
    return Job(
        name=wish.name,
        options=tuple(Option(one.kind, one.gpus, known[one].rate) for one in wish.options),
        weight=wish.weight,
        group=wish.group,
        arrived=wish.submitted,
        work=max(measured.left, 1e-9),
        deadline=max(wish.deadline - now, 1.0),
        elapsed=now - wish.submitted,
    )


def _running(state: QueueState, name: str, here: Place) -> Running:
    measured = state.measured[name]
    return Running(here, float(state.queued[name][-1].seconds), measured.save_seconds + measured.start_seconds)


def _probes(state: QueueState, cluster: Cluster) -> dict[str, Place]:
    """Returns what is tried: nothing where nothing was measured yet, since whatever a job runs on is measured first."""
    found = {}
    for name, known in state.estimates.items():
        option = probe(known, cluster.counts) if any(one.measured for one in known.values()) else None
        if option is not None:
            found[name] = Place((name,), option.kind, option.gpus)
    return found


def _move(
    folder: Folder, state: QueueState, wishes: Sequence[Wish], placed: Mapping[str, Place]
) -> tuple[int, dict[str, str]]:
    """Starts what should run elsewhere than it does, and then ends what should not run.

    Returns how many were started, and by name why others were refused: what these have runs on.
    """
    moved, old, refused = 0, list[str](), {}
    for wish in wishes:
        here = placed.get(wish.name)
        on = wish.place(here) if here is not None else None
        mine = state.queued.get(wish.name, [])
        stays = next((job for job in reversed(mine) if job.comment == f"{COMMENT}{on}"), None)
        ends = [job.id for job in mine if job is not stays]
        if on is not None and stays is None:
            files = folder.of(wish.name)
            try:
                commands.submit(options(wish, on, files, tuple(ends)), script(wish, on, files))
            except ConfigError as error:
                refused[wish.name] = str(error)
                continue
            moved += 1
        old += ends
    commands.cancel(old)
    return moved, refused
