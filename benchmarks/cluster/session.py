"""Session: the ranks of a job, started once, on which systems run one after the other."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster.results.latency import measure_latency
from benchmarks.cluster.results.report import Run
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import Record, System
from benchmarks.cluster.testbed.hosts import Hosts
from benchmarks.cluster.testbed.machine import ROOT, wait_for_calm
from benchmarks.cluster.testbed.ranks import Ranks, RanksFailed, worker_command
from benchmarks.cluster.testbed.wake_up import VARIABLE

SLOWEST = 8.0
"""A step may take this many times the limit before a run counts as failed."""
START_S = 120.0
"""For starting the ranks and building a system, on a busy machine."""
MOST_RUNS = 3
"""How often a run is tried where the machine's host takes the cores."""
NS_PER_S = 1e9


class Session:
    """A context manager. After a failed run the next one gets fresh ranks."""

    def __init__(
        self,
        hosts: Hosts,
        ranks: int,
        wake_up_s: float,
        timeout: float | None = None,
        wait_for_calm: Callable[[], object] = wait_for_calm,
        progress: Path | None = None,
        timelines: bool = False,
        device: str = "cpu",
    ):
        """Args:
        wake_up_s: how late this machine wakes up what sleeps, without ranks (measure_wake_up_s).
        timeout: seconds until a run counts as failed; None: by its scenario.
        wait_for_calm: called before each run.
        progress: file that gets the number of steps that a run has done.
        timelines: keep each run's last step, see Run.timelines.
        device: "sim": systems may compute on the simulated device.
        """
        self._hosts = hosts
        self._count, self._device = ranks, device
        self._timeout = timeout
        self._wake_up_s = wake_up_s
        self._wait_for_calm = wait_for_calm
        self._wanted = {"progress": None if progress is None else str(progress), "timeline": timelines}
        self._ranks: Ranks | None = None
        self._started = ExitStack()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks = None
        self._started.close()

    def run(self, scenario: Scenario, system: System, *, steps: int, warm_up: int) -> Run:
        """Returns one run of `system`: `warm_up` steps, or what the system needs, then `steps` measured ones.

        While the host of a virtual machine gives its cores to others, sleeping layers wake up to 100 ms late. So
        a run waits a while for the cores, and one that lost much is run again, twice at most; the one that lost least
        counts. Unshaped runs are no measurements and run once.

        Raises: RanksFailed.
        """
        if scenario.ranks != self._count:
            raise ValueError(f"scenario {scenario.name} has {scenario.ranks} ranks, this session {self._count}")
        warm_up = max(warm_up, system.family.warm_up)
        request = {"scenario": asdict(scenario), "system": system.name, "steps": steps, "warm_up": warm_up}
        request |= self._wanted
        step = scenario.limit_s + scenario.communication_s
        timeout = self._timeout or START_S + SLOWEST * (steps + warm_up) * step
        runs = [self._ask(scenario, request, timeout)]
        try:
            while self._hosts.shaped and not runs[-1].is_calm and len(runs) < MOST_RUNS:
                runs.append(self._ask(scenario, request, timeout))
        except RanksFailed:
            pass  # what was measured before it is a result
        calmest = min(runs, key=lambda run: run.stolen)
        return replace(calmest, dropped_s=tuple(run.step_s for run in runs if run is not calmest))

    def _ask(self, scenario: Scenario, request: dict[str, Any], timeout: float) -> Run:
        try:
            ranks = self._start()
            self._wait_for_calm()
            return make_run(scenario, ranks.ask(request, timeout))
        except RanksFailed:
            self.__exit__()
            raise

    def _start(self) -> Ranks:
        if self._ranks is None:
            folder = Path(self._started.enter_context(tempfile.TemporaryDirectory(prefix="fold3d-cluster-")))
            paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            environment = {
                **os.environ,
                **self._hosts.environment(),
                "PYTHONPATH": paths,
                VARIABLE: repr(self._wake_up_s),
            }
            commands = [
                self._hosts.command(rank, worker_command(rank, self._count, self._device))
                for rank in range(self._count)
            ]
            self._ranks = self._started.enter_context(Ranks(commands, environment, folder))
        return self._ranks


def make_run(scenario: Scenario, results: list[dict[str, Any]]) -> Run:
    """Returns what the answers of all ranks say; `results` in order of ranks."""
    # All ranks share one clock. A step has ended when the slowest rank has.
    ends = [max(of_step) for of_step in zip(*(result["ends_ns"] for result in results), strict=True)]
    steps = tuple((end - start) / NS_PER_S for start, end in pairwise(ends))
    sent = [result["sent_bytes"] for result in results if result["sent_bytes"] is not None]
    records: list[list[list[Record]]] = [
        [[(lane, action, start, end) for lane, action, start, end in of_step] for of_step in result["records"]]
        for result in results
    ]
    return Run(
        step_s=statistics.median(steps),
        stolen=results[0]["stolen"],
        steps_s=steps,
        sent_bytes=max(sent, default=None),
        latency=measure_latency(scenario, records),
        breakdowns=tuple(result["breakdown"] for result in results if result["breakdown"]),
        asleep=max(result["asleep"] for result in results),
        choices=tuple(result["choice"] for result in results if result["choice"]),
        action_s=_seconds_per_action(scenario, records),
        timelines=tuple(tuple(result["timeline"]) for result in results if result["timeline"]),
    )


def _seconds_per_action(scenario: Scenario, records: list[list[list[Record]]]) -> float | None:
    """Returns by how much a compute action took longer than its layers: the runtime's and Python's part."""
    passes = [end - start for rank in records for step in rank for lane, _, start, end in step if lane == "compute"]
    if not passes:
        return None
    steps = sum(len(rank) for rank in records)
    return (sum(passes) / NS_PER_S - steps * scenario.compute_s) / len(passes)
