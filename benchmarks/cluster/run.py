"""main(): runs systems in turn on one network and writes table, JSON and picture."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.comparison import Effort, compare
from benchmarks.cluster.grid import SHAPES, GridReport, measure_grid
from benchmarks.cluster.offloading import OffloadReport, measure_offloading
from benchmarks.cluster.preemption import PreemptionReport, measure_preemption
from benchmarks.cluster.results.progress import say
from benchmarks.cluster.results.report import Report
from benchmarks.cluster.scenarios import SCENARIOS, Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import DEFAULT, DEFAULT_ON_DEVICE, FAMILIES, find_systems, on_device
from benchmarks.cluster.testbed.hosts import Hosts, Link, LoopbackHosts, NamespaceHosts, why_unavailable
from benchmarks.cluster.testbed.machine import describe_commit, describe_machine, wait_for_calm
from benchmarks.cluster.testbed.wake_up import measure_wake_up_s

BUSY = 0.5
"""Load average above which the run warns."""
LATENCY_BURST_S = 0.001
"""With the usual 4 ms a message on an idle link gets its first 50 kB for nothing; one on a loaded link, however well it
is served, takes 1.36 times as long in scenario D."""
GRID = ("A", "B", "D")
"""Scenarios of the grid where the command names none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a run of some system failed."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is put away
    load = os.getloadavg()[0]
    if load > BUSY:
        say(f"the machine is busy (load {load:.1f}): every time below is too long, and not equally")
    try:
        _check(options)
        unshaped = options.loopback or _falls_back()
        wait = _no_wait if unshaped else wait_for_calm
        about = _about(arguments)
        wait()
        about["machine"]["wake_up_s"] = wake_up_s = measure_wake_up_s()  # before there are ranks, once for all of them
        report = _measure(
            options,
            partial(_hosts, options, unshaped),
            partial(Session, wake_up_s=wake_up_s, timeout=options.timeout, wait_for_calm=wait),
        )
    except ValueError as error:
        say(str(error))
        return 2
    print(report.table())
    for name, texts in report.failures.items():
        say(f"\n{name}: {texts[0]}")
    if options.json:
        options.json.write_text(json.dumps({**about, **report.as_json()}, indent=1) + "\n")
    if options.png:
        from benchmarks.cluster.results.chart import draw_chart, draw_grid

        if isinstance(report, GridReport):
            draw_grid(report, options.png)
        elif isinstance(report, Report) and report.runs:
            draw_chart(report, options.png)
    return 1 if report.failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    known = ", ".join(name + (":SEGMENTS" if family.folds else "") for name, family in FAMILIES.items())
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--scenario", choices=SCENARIOS, help="compare systems in it, see README.md (default A)")
    what.add_argument(
        "--latency",
        choices=SCENARIOS,
        nargs="?",
        const="D",
        help="messages beside DP.sync, with and without preemption",
    )
    what.add_argument(
        "--grid", choices=SHAPES, nargs="*", help=f"the simulator against measured steps (default {' '.join(GRID)})"
    )
    what.add_argument(
        "--offload", choices=SCENARIOS, nargs="?", const="O", help="what copies of stashes cost, at two rates"
    )
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=f"with --scenario: of {known}")
    parser.add_argument(
        "--device",
        choices=("cpu", "sim"),
        default="cpu",
        help="with --scenario: what the layers compute on: sim is the simulated device of simdevice/, which "
        "launches asynchronously; the reference runs on the CPU, too (default cpu)",
    )
    parser.add_argument("--repetitions", type=_positive, help="runs of each system, in turn (default 3, --grid 1)")
    parser.add_argument("--steps", type=_positive, help="measured steps of a run (default by scenario, --grid 3)")
    parser.add_argument("--warm-up", type=_positive, default=1, help="least number of steps before them (default 1)")
    parser.add_argument("--loopback", action="store_true", help="without limits and without root; labelled unshaped")
    parser.add_argument("--without-dp-sync", action="store_true", help="no gradients to speak of: the pipeline alone")
    parser.add_argument(
        "--thin", type=_positive, default=1, metavar="N", help="bytes and rate divided by N: same times, less CPU"
    )
    parser.add_argument(
        "--slow", type=_positive, default=1, metavar="N", help="times of layers and links N-fold: same shares, less CPU"
    )
    parser.add_argument(
        "--rtt", type=float, default=0.0, metavar="MS", help="round trip between two hosts (default 0: the machine's)"
    )
    parser.add_argument(
        "--jitter", type=float, default=0.0, metavar="MS", help="by how much it varies, up and down (default 0)"
    )
    parser.add_argument(
        "--slow-host", type=float, default=1.0, metavar="N", help="layers on the last host take N times as long"
    )
    parser.add_argument(
        "--ranks-per-host", type=_positive, default=1, metavar="N", help="ranks that share a link of N times the rate"
    )
    parser.add_argument("--timeout", type=float, help="seconds until a run counts as failed (default by scenario)")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--png", type=Path, help="draw the comparison or the grid here (needs matplotlib)")
    options = parser.parse_args(arguments)
    compares = options.grid is None and options.latency is None and options.offload is None
    for name, given in (
        ("--systems", options.systems),
        ("--without-dp-sync", options.without_dp_sync),
        ("--device sim", options.device == "sim"),
    ):
        if given and not compares:
            parser.error(f"{name} has an effect only with --scenario")
    for name in ("thin", "slow"):
        if getattr(options, name) > 1 and options.latency:
            parser.error(f"--{name} has no effect with --latency: nothing is computed there")
    if options.loopback and (options.rtt or options.jitter or options.ranks_per_host > 1):
        parser.error("--rtt, --jitter and --ranks-per-host are about hosts with links; remove --loopback")
    if options.latency and options.slow_host > 1:
        parser.error("--slow-host has no effect with --latency: nothing is computed there")
    for name in ("latency", "offload"):
        if options.png and getattr(options, name):
            parser.error(f"--png has no effect with --{name}: it is a table")
    if options.offload and not SCENARIOS[options.offload].copy_rate:
        parser.error(f"--offload {options.offload}: the layers of this scenario save nothing; O's do")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _about(arguments: Sequence[str] | None) -> dict[str, Any]:
    return {
        "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks.cluster", *(arguments or sys.argv[1:])]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_commit(),
        "machine": describe_machine(),
    }


def _check(options: argparse.Namespace) -> None:
    """Raises: ValueError for systems that are unknown or do not fit the scenario, or hosts that cannot be."""
    Link(rate_mbit=1.0, rtt_ms=options.rtt, jitter_ms=options.jitter)
    _scenario(options, options.latency or options.offload or options.scenario or "A")
    for name in _names(options):
        find_systems(name, SCENARIOS[options.scenario or "A"])


def _names(options: argparse.Namespace) -> Sequence[str]:
    if options.device == "sim":
        return on_device(options.systems or DEFAULT_ON_DEVICE)
    return tuple(options.systems or DEFAULT)


def _no_wait() -> bool:
    """Unshaped figures are no measurements: any machine will do."""
    return True


def _measure(
    options: argparse.Namespace, hosts_of: Callable[..., Hosts], session_on: Callable[..., Session]
) -> Report | PreemptionReport | GridReport | OffloadReport:
    if options.grid is not None:
        return _measure_grid(options, hosts_of, session_on)
    if options.offload:
        return _measure_offload(options, hosts_of, session_on)
    scenario = _scenario(options, options.latency or options.scenario or "A")
    effort = _effort(options, repetitions=3, steps=scenario.steps)
    if options.latency:
        with (
            hosts_of(scenario, burst_s=LATENCY_BURST_S) as hosts,
            session_on(hosts, scenario.ranks) as session,
        ):
            found = PreemptionReport(scenario=scenario, network=hosts.description, shaped=hosts.shaped)
            measure_preemption(found, session, effort)
        return found
    if options.without_dp_sync:
        name = f"{scenario.name}, no gradients"
        scenario = replace(scenario, name=name, title="the pipeline alone", gradient_bytes=0)
    entries = [find_systems(name, scenario) for name in _names(options)]
    device = "sim" if any(system.device == "sim" for entry in entries for system in entry) else "cpu"
    with hosts_of(scenario) as hosts, session_on(hosts, scenario.ranks, device=device) as session:
        report = Report(scenario=scenario, network=hosts.description, shaped=hosts.shaped)
        compare(report, entries, session, effort)
    return report


def _measure_offload(
    options: argparse.Namespace, hosts_of: Callable[..., Hosts], session_on: Callable[..., Session]
) -> OffloadReport:
    scenario = _scenario(options, options.offload)
    effort = _effort(options, repetitions=3, steps=scenario.steps)
    with hosts_of(scenario) as hosts, session_on(hosts, scenario.ranks) as session:
        report = OffloadReport(scenario=scenario, network=hosts.description, shaped=hosts.shaped)
        measure_offloading(report, session, effort)
    return report


def _measure_grid(
    options: argparse.Namespace, hosts_of: Callable[..., Hosts], session_on: Callable[..., Session]
) -> GridReport:
    effort = _effort(options, repetitions=1, steps=3)
    report = GridReport()
    for base in options.grid or GRID:
        scenario = _scenario(options, base)
        with hosts_of(scenario) as hosts, session_on(hosts, scenario.ranks) as session:
            report.networks[base] = hosts.description
            report.shaped = hosts.shaped
            measure_grid(report, base, scenario, session, effort)
    return report


def _scenario(options: argparse.Namespace, name: str) -> Scenario:
    one = SCENARIOS[name].thinned(options.thin).slowed(options.slow)
    return one.on_hosts(ranks_per_host=options.ranks_per_host, slow_host=options.slow_host)


def _effort(options: argparse.Namespace, *, repetitions: int, steps: int) -> Effort:
    return Effort(repetitions=options.repetitions or repetitions, steps=options.steps or steps, warm_up=options.warm_up)


def _falls_back() -> bool:
    """Returns whether links cannot be limited here, and tells why."""
    reason = why_unavailable()
    if reason:
        say(f"{reason}: running UNSHAPED on the loopback interface instead")
    return bool(reason)


def _hosts(options: argparse.Namespace, unshaped: bool, scenario: Scenario, burst_s: float | None = None) -> Hosts:
    if unshaped:
        return LoopbackHosts()
    rate = scenario.rate_mbit * scenario.ranks_per_host
    link = Link(rate_mbit=rate, burst_s=burst_s, rtt_ms=options.rtt, jitter_ms=options.jitter)
    return NamespaceHosts(scenario.ranks // scenario.ranks_per_host, link, scenario.ranks_per_host)
