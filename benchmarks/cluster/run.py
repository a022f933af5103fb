"""main(): runs systems in turn on one network and writes table, JSON and picture."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import Hosts, Link, LoopbackHosts, NamespaceHosts, why_unavailable
from benchmarks.cluster.latency import measure_latency
from benchmarks.cluster.machine import ROOT, describe_commit, describe_machine
from benchmarks.cluster.ranks import RanksFailed, run_ranks, worker_command
from benchmarks.cluster.report import Report, Run
from benchmarks.cluster.scenarios import SCENARIOS, Scenario
from benchmarks.cluster.systems import DEFAULT, FAMILIES, System, find_system

SLOWEST = 8.0
"""A step may take this many times the limit before a run counts as failed."""
BUSY = 0.5
"""Load average above which the run warns."""
START_S = 90.0
"""For starting the ranks of a run and connecting them, on a busy machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a run of some system failed."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is put away
    scenario = SCENARIOS[options.scenario]
    if options.without_dp_sync:
        name = f"{scenario.name}, no gradients"
        scenario = replace(scenario, name=name, title="the pipeline alone", gradient_bytes=0)
    try:
        systems = [find_system(name, scenario) for name in options.systems]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    about = {
        "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks.cluster", *(arguments or sys.argv[1:])]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "repetitions": options.repetitions,
        "steps": options.steps,
        "warm_up": options.warm_up,
        **describe_commit(),
        "machine": describe_machine(),
    }
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"the machine is busy (load {load:.1f}): every time below is too long, and not equally", file=sys.stderr)
    with _hosts(options.loopback, scenario) as hosts, tempfile.TemporaryDirectory(prefix="fold3d-cluster-") as folder:
        report = Report(scenario=scenario, network=hosts.description, shaped=hosts.shaped)
        _run_all(report, systems, hosts, Path(folder), options)
    print(report.table())
    for name, texts in report.failures.items():
        print(f"\n{name}: {texts[0]}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({**about, **report.as_json()}, indent=1) + "\n")
    if options.png and report.runs:
        from benchmarks.cluster.chart import draw_chart

        draw_chart(report, options.png)
    return 1 if report.failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    known = ", ".join(name + (":SEGMENTS" if family.folds else "") for name, family in FAMILIES.items())
    parser.add_argument("--scenario", choices=SCENARIOS, default="A", help="see README.md (default A)")
    parser.add_argument("--systems", nargs="+", default=DEFAULT, metavar="SYSTEM", help=f"of {known}")
    parser.add_argument("--repetitions", type=_positive, default=5, help="runs of each system, in turn (default 5)")
    parser.add_argument("--steps", type=_positive, default=8, help="measured steps of a run (default 8)")
    parser.add_argument("--warm-up", type=_positive, default=2, help="steps before them (default 2)")
    parser.add_argument("--loopback", action="store_true", help="without limits and without root; labelled unshaped")
    parser.add_argument("--without-dp-sync", action="store_true", help="no gradients to speak of: the pipeline alone")
    parser.add_argument("--timeout", type=float, help="seconds until a run counts as failed (default by scenario)")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--png", type=Path, help="draw the comparison here (needs matplotlib)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _hosts(loopback: bool, scenario: Scenario) -> Hosts:
    reason = "" if loopback else why_unavailable()
    if reason:
        print(f"{reason}: running UNSHAPED on the loopback interface instead", file=sys.stderr)
    if loopback or reason:
        return LoopbackHosts()
    return NamespaceHosts(scenario.ranks, Link(rate_mbit=scenario.rate_mbit))


def _run_all(
    report: Report, systems: Sequence[System], hosts: Hosts, folder: Path, options: argparse.Namespace
) -> None:
    """Runs every system once, then every system again: a machine that gets slower is so for all."""
    started, done, total = time.monotonic(), 0, len(systems) * options.repetitions
    for repetition in range(options.repetitions):
        for system in systems:
            place = folder / f"run{done}"
            place.mkdir()
            try:
                run = _run_once(report.scenario, system, hosts, place, options)
                report.runs.setdefault(system.name, []).append(run)
                outcome = f"{run.step_s:.3f} s, {run.step_s / report.scenario.limit_s:.3f} x limit"
            except RanksFailed as error:
                report.failures.setdefault(system.name, []).append(str(error))
                outcome = "FAILED"
            done += 1
            left = (time.monotonic() - started) / done * (total - done)
            print(
                f"[{done}/{total}] repetition {repetition + 1} {system.name}: {outcome}; {left / 60:.1f} min left",
                file=sys.stderr,
                flush=True,
            )


def _run_once(scenario: Scenario, system: System, hosts: Hosts, folder: Path, options: argparse.Namespace) -> Run:
    job = {
        "scenario": asdict(scenario),
        "system": system.name,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "parent": os.getpid(),
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    steps = options.steps + options.warm_up
    timeout = options.timeout or START_S + SLOWEST * steps * (scenario.limit_s + scenario.communication_s)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    run_ranks(
        [hosts.command(rank, worker_command(path, rank)) for rank in range(scenario.ranks)],
        {**os.environ, **hosts.environment(), "PYTHONPATH": paths},
        folder,
        timeout,
    )
    results: list[dict[str, Any]] = [
        json.loads((folder / f"result{rank}.json").read_text()) for rank in range(scenario.ranks)
    ]
    sent = [result["sent_bytes"] for result in results if result["sent_bytes"] is not None]
    return Run(
        step_s=max(result["step_s"] for result in results),
        steps_s=tuple(tuple(result["steps_s"]) for result in results),
        sent_bytes=max(sent, default=None),
        latency=measure_latency(scenario, [result["records"] for result in results]),
    )
