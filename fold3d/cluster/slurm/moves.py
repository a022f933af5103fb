"""A round on Slurm: who runs where, and the few commands that make it so.

A move is `sbatch --dependency=afterany:OLD..` of all that start and then `scancel OLD..` of all that end. If that is
cut off between the two, the old jobs run on and the new ones wait; the next round sees both and ends the old ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from fold3d.cluster.jobs import Allocation, Cluster, Job, Option, Place, isolated_rates
from fold3d.cluster.policies import Policy, allocate
from fold3d.cluster.rates import Estimate, estimate, probe
from fold3d.cluster.rounds import Rules, Running, place
from fold3d.cluster.slurm import commands
from fold3d.cluster.slurm.commands import Queued
from fold3d.cluster.slurm.folder import Folder, Wish
from fold3d.cluster.slurm.script import options, script

_LATEST = 3
"""Rounds: what has not been entered for longer is not: nobody held rounds meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What there is before a round."""

    wishes: tuple[Wish, ...]
    """Of jobs that have not ended."""
    queued: dict[str, list[Queued]]
    """By the names of those."""
    estimates: dict[str, dict[Option, Estimate]]

    def place_of(self, wish: Wish) -> Place | None:
        """Returns where a job is, or waits to be."""
        mine = self.queued.get(wish.name)
        found = mine and next((on for on in wish.on if mine[-1].comment == f"fold3d {on}"), None)
        return Place((wish.name,), found.kind, found.gpus) if found else None


def look(folder: Folder) -> State:
    """Returns what there is."""
    wishes = tuple(wish for wish in folder.wishes() if folder.ended(wish.name) is None)
    names = {wish.name for wish in wishes}
    queued: dict[str, list[Queued]] = {}
    for job in commands.queue():
        if job.name in names and job.comment.startswith("fold3d "):
            queued.setdefault(job.name, []).append(job)
    estimates = {wish.name: estimate(wish.options, wish.measured().rates) for wish in wishes}
    return State(wishes=wishes, queued=queued, estimates=estimates)


def hold(folder: Folder, policy: Policy, cluster: Cluster, rules: Rules) -> tuple[Allocation, dict[str, Place], int]:
    """Holds one round; returns what jobs are due, where they are now, and how many were started or moved.

    Raises: ConfigError where another round is in progress, where Slurm refuses, or for jobs that run nowhere.
    """
    with folder.locked():
        state, now = look(folder), time.time()
        jobs = [_job(wish, state, now) for wish in state.wishes]
        alone = isolated_rates(jobs, cluster) if jobs else []
        done = [wish.measured().done for wish in state.wishes]
        jobs = [
            replace(job, isolated=d / rate if rate else 0.0) for job, d, rate in zip(jobs, done, alone, strict=True)
        ]
        allocation = allocate(policy, jobs, cluster)
        ledger, until = folder.ledger()
        before = {wish.name: here for wish in state.wishes if (here := state.place_of(wish)) is not None}
        active = {name: here for name, here in before.items() if state.queued[name][-1].state == "RUNNING"}
        ledger.enter(allocation, active, min(now - until, _LATEST * rules.seconds) if until else 0.0)
        for name in {name for here in ledger.debts for name in here.jobs} - {job.name for job in jobs}:
            ledger.forget(name)
        ledger.renew(rules)
        folder.keep(ledger, now)
        running = {name: _running(state, name, here) for name, here in before.items()}
        placed = place(allocation, jobs, cluster, ledger, running, rules, _probes(state))
        return allocation, placed, _move(folder, state, placed)


def _job(wish: Wish, state: State, now: float) -> Job:
    measured = wish.measured()
    known = state.estimates[wish.name]
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


def _running(state: State, name: str, here: Place) -> Running:
    measured = next(wish for wish in state.wishes if wish.name == name).measured()
    return Running(here, float(state.queued[name][-1].seconds), measured.save_seconds + measured.start_seconds)


def _probes(state: State) -> dict[str, Place]:
    """Returns what is tried: nothing where nothing was measured yet, since whatever a job runs on is measured first."""
    found = {}
    for name, known in state.estimates.items():
        option = probe(known) if any(one.measured for one in known.values()) else None
        if option is not None:
            found[name] = Place((name,), option.kind, option.gpus)
    return found


def _move(folder: Folder, state: State, placed: dict[str, Place]) -> int:
    """Starts what should run elsewhere than it does, and then ends what should not run."""
    new, old = [], []
    for wish in state.wishes:
        here = placed.get(wish.name)
        wanted = f"fold3d {wish.place(here)}" if here is not None else None
        mine = state.queued.get(wish.name, [])
        stays = next((job for job in reversed(mine) if job.comment == wanted), None)
        old += [job.id for job in mine if job is not stays]
        if here is not None and stays is None:
            new.append((wish, wish.place(here)))
    for wish, on in new:
        files = folder.of(wish.name)
        commands.submit(options(wish, on, files, tuple(old)), script(wish, on, files))
    commands.cancel(old)
    return len(new)
