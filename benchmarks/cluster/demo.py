"""`python -m benchmarks.cluster.demo`: fold3d and what others do, side by side on a network that is slow for them all.

Four hosts (network namespaces) with limited links train the same layers by three systems in turn. In about two minutes:
bars in the terminal, a chart, a timeline of a step of each system, and what was hidden. Needs root; leaves nothing
behind.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.cluster.comparison import Effort, run_once
from benchmarks.cluster.results.chart import draw_chart, draw_steps
from benchmarks.cluster.results.progress import say
from benchmarks.cluster.results.report import Report, Run
from benchmarks.cluster.scenarios import SCENARIOS, Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import REFERENCE, System, find_system
from benchmarks.cluster.testbed.hosts import Hosts, Link, LoopbackHosts, NamespaceHosts, why_unavailable
from benchmarks.cluster.testbed.machine import wait_for_calm
from benchmarks.cluster.testbed.wake_up import measure_wake_up_s
from fold3d.observe.step_breakdown import StepBreakdown, make_breakdown
from fold3d.observe.timeline import write_trace
from fold3d.observe.timeline_picture import write_picture

NAMES = {
    REFERENCE: "fold3d, as it plans itself",
    "torch-bfs": "torch.distributed.pipelining, looped breadth first",
    "fold3d-interleaved-npp": "Megatron's order (interleaved, N = pp)",
}
"""What is compared: fold3d, torch's best order and Megatron's usual one, on fold3d's own transport."""
BAR = 44
"""Characters of the longest bar."""
LOOK_S = 0.3
FORMAT = "{desc}step {n_fmt} of {total_fmt}, {elapsed} {bar}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when a run failed, 2 where links cannot be limited, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo-network"), help="folder, default out/demo-network")
    parser.add_argument("--scenario", choices=SCENARIOS, default="A", help="see README.md, default A")
    parser.add_argument("--thin", type=int, default=4, metavar="N", help="bytes and rate divided by N, default 4")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each system, default 6")
    parser.add_argument("--loopback", action="store_true", help="without limits and without root: shows nothing")
    options = parser.parse_args(arguments)
    reason = "" if options.loopback else why_unavailable()
    if reason:
        say(f"{reason}: run it as root on Linux, for example: sudo make demo-network")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is put away
    scenario = SCENARIOS[options.scenario].thinned(options.thin)
    hosts: Hosts = (
        LoopbackHosts() if options.loopback else NamespaceHosts(scenario.ranks, Link(rate_mbit=scenario.rate_mbit))
    )
    try:
        report = measure(scenario, hosts, options.steps)
    except KeyboardInterrupt:
        say("\ninterrupted: the hosts and everything on them are gone")
        return 130
    for name, texts in report.failures.items():
        say(f"{name}: {texts[0]}")
    if report.failures:
        return 1
    print(describe(report, write(report, options.out)))
    return 0


def measure(scenario: Scenario, hosts: Hosts, steps: int) -> Report:
    """Returns one run of every system, with a line that says how far it is."""
    systems = [find_system(name, scenario) for name in NAMES]
    effort = Effort(repetitions=1, steps=steps, warm_up=1)
    total = sum(steps + max(effort.warm_up, system.family.warm_up) for system in systems)
    say(f"{scenario.ranks} hosts, {hosts_text(scenario, hosts)}; each system trains the same layers in turn")
    with (
        tempfile.TemporaryDirectory(prefix="fold3d-demo-") as folder,
        hosts,
        tqdm(total=total, bar_format=FORMAT) as bar,
    ):
        progress = Path(folder) / "steps"
        calm = partial(wait_for_calm, most_s=0.0) if hosts.shaped else bool
        report = Report(scenario=scenario, network=hosts.description, shaped=hosts.shaped)
        bar.set_description("starting the hosts")
        with Session(
            hosts, scenario.ranks, measure_wake_up_s(), wait_for_calm=calm, progress=progress, timelines=True
        ) as session:
            for system in systems:
                with following(bar, progress, system):
                    run_once(report, scenario, system, session, effort)
                if system.name in report.runs:
                    seconds = report.median_s(system.name)
                    bar.write(f"  {seconds:6.3f} s a step: {title_of(system.name)}", file=sys.stderr)
    return report


@contextlib.contextmanager
def following(bar: tqdm[None], progress: Path, system: System) -> Iterator[None]:
    """In its body a thread shows the steps that a run says it has done."""
    progress.unlink(missing_ok=True)
    before, ended = bar.n, threading.Event()
    bar.set_description(system.name)

    def look() -> None:
        text = progress.read_text() if progress.exists() else ""
        done = before + int(text or 0)
        if done != bar.n or sys.stderr.isatty():  # a log file needs no clock
            bar.n = done
            bar.refresh()

    def follow() -> None:
        while not ended.wait(LOOK_S):
            look()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def hosts_text(scenario: Scenario, hosts: Hosts) -> str:
    """Returns the links in words."""
    return f"links of {scenario.rate_mbit:g} Mbit/s" if hosts.shaped else "UNSHAPED: no statement about any network"


def title_of(name: str) -> str:
    """Returns a system in words."""
    return NAMES[name.partition(":")[0]]


def write(report: Report, out: Path) -> dict[str, list[Path]]:
    """Writes chart, steps and timelines; returns their paths by the name of the system, those of all by ""."""
    out.mkdir(parents=True, exist_ok=True)
    written = {"": [out / "chart.png", out / "steps.png"]}
    draw_chart(report, out / "chart.png")
    draw_steps(report, out / "steps.png", {name: title_of(name) for name in report.runs})
    for name, runs in report.runs.items():
        path = out / f"timeline-{name.replace(':', '-')}"
        records = runs[-1].timelines
        pictures = [path.with_suffix(".png"), path.with_suffix(".json")]
        write_picture(pictures[0], records, pp=report.scenario.pp, title=f"{title_of(name)}: one step")
        write_trace(pictures[1], records, pp=report.scenario.pp)
        written[name] = pictures
    return written


def describe(report: Report, written: dict[str, list[Path]]) -> str:
    """Returns the result in words and bars."""
    scenario = report.scenario
    names = sorted(report.runs, key=report.median_s)
    longest = max(map(report.median_s, names))
    lines = ["", f"{'':46}  s a step"]
    for name in names:
        seconds = report.median_s(name)
        bar = "█" * max(1, round(BAR * seconds / longest))
        more = report.ratio_to_reference(name)
        beside = "" if name == REFERENCE or more is None else f"  {more:.2f} x fold3d"
        lines.append(f"{title_of(name)[:52]:52} {seconds:6.3f}  {bar}{beside}")
    lines.append(
        f"{'the limit: compute and bubble alone':52} {scenario.limit_s:6.3f}  "
        f"{'░' * max(1, round(BAR * scenario.limit_s / longest))}"
    )
    lines += ["", "One step of each, four hosts below each other; red is waiting for DP.sync, grey for another stage:"]
    for name in names:
        lines += [f"  {path}" for path in written[name][:1]]
    lines += [f"  {written[names[0]][1].parent}/*.json  the same for https://ui.perfetto.dev"]
    chart, steps = written[""]
    lines += [f"  {steps}  one host of each, below each other", f"  {chart}  the bars as a picture", ""]
    return "\n".join([*lines, _verdict(report, names)])


def _verdict(report: Report, names: Sequence[str]) -> str:
    scenario = report.scenario
    network = f"links of {scenario.rate_mbit:g} Mbit/s" if report.shaped else "UNSHAPED links (no measurement)"
    others = [name for name in names if name != REFERENCE]
    slower = ", ".join(f"{report.ratio_to_reference(name):.2f} times that with {title_of(name)}" for name in others)
    ours = _waited(report.runs[REFERENCE][-1])
    theirs = ", ".join(f"{_waited(report.runs[name][-1]):.0f} ms" for name in others)
    needed = 1e3 * scenario.dp_sync_s
    hidden = 100 * max(0.0, 1 - ours / needed)
    return (
        f"On {network} a step takes {report.median_s(REFERENCE):.2f} s with fold3d, {slower}.\n"
        f"The sum of the gradients needs {needed:.0f} ms of the network in every step: in its last one fold3d waited "
        f"{ours:.0f} ms for it ({hidden:.0f} % hidden), the others {theirs}."
    )


def _waited(run: Run) -> float:
    """Returns how many ms the rank with most of it waited for DP.sync in the last step."""
    return max(_breakdown(records).exposed_dp_ms for records in run.timelines)


def _breakdown(records: Sequence[Sequence[object]]) -> StepBreakdown:
    raw = [(str(r[0]), str(r[1]), int(str(r[2])), int(str(r[3])), int(str(r[4]))) for r in records]
    computed = [start for lane, _, start, _, _ in raw if lane in ("compute", "wait")]
    return make_breakdown(raw, min(computed), max(end for _, _, _, end, _ in raw))


if __name__ == "__main__":
    sys.exit(main())
