"""compare(): every system in turn on one network, several times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster.results.progress import say
from benchmarks.cluster.results.report import Report
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import System
from benchmarks.cluster.testbed.ranks import RanksFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured."""

    repetitions: int
    steps: int
    """Measured steps of a run."""
    warm_up: int
    """Steps before them; a system that needs more takes more."""


def compare(report: Report, entries: Sequence[Sequence[System]], session: Session, effort: Effort) -> None:
    """Fills `report`: every entry runs once, then every entry again, so a machine that gets slower is so for all.

    Args:
        entries: candidates of one place each. In the first repetition all candidates run, then the fastest.
    """
    started = time.monotonic()
    places = [list(candidates) for candidates in entries]
    total = sum(map(len, places)) + len(places) * (effort.repetitions - 1)
    done = 0
    for repetition in range(effort.repetitions):
        for place in places:
            for system in place:
                outcome = run_once(report, report.scenario, system, session, effort)
                done += 1
                left = (time.monotonic() - started) / done * (total - done)
                say(f"[{done}/{total}] repetition {repetition + 1} {system.name}: {outcome}; {left / 60:.1f} min left")
            place[:] = _fastest(report, place)


def run_once(report: Report, scenario: Scenario, system: System, session: Session, effort: Effort) -> str:
    """Runs a system once, enters the run or the failure in `report`, returns it as text."""
    try:
        run = session.run(scenario, system, steps=effort.steps, warm_up=effort.warm_up)
    except RanksFailed as error:
        report.failures.setdefault(system.name, []).append(str(error))
        return "FAILED"
    report.runs.setdefault(system.name, []).append(run)
    return f"{run.step_s:.3f} s, {run.step_s / scenario.limit_s:.3f} x limit"


def _fastest(report: Report, candidates: Sequence[System]) -> list[System]:
    known = [one for one in candidates if one.name in report.runs]
    return [min(known, key=lambda one: report.median_s(one.name))] if known else list(candidates[:1])
