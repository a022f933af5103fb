"""Report: the medians of a comparison, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cluster.results.latency import Latency
from benchmarks.cluster.rivals import rival_costs
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import FAMILIES, REFERENCE, Family
from benchmarks.cluster.testbed.machine import MAX_STOLEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one system. Times in seconds."""

    step_s: float
    """Median over the measured steps."""
    steps_s: tuple[float, ...]
    """Each measured step, from one end to the next; a step has ended when the slowest rank has."""
    stolen: float
    """Of the time for which the machine's cores had work during these steps, the share that its host gave to others."""
    sent_bytes: float | None
    """Bytes the busiest host sent per step, with headers; None when unshaped."""
    latency: Latency
    """Of the messages between stages."""
    dropped_s: tuple[float, ...] = ()
    """What `step_s` was in the runs before or after it from which more was stolen, and which it replaces."""
    breakdowns: tuple[dict[str, float], ...] = ()
    """Where the time of the last step went, of each rank, in ms; empty where a system does not say."""
    asleep: float = 0.0
    """Of the measured steps, the share in which the thread that trains waited for something, other than a core; of the
    rank with most of it."""
    choices: tuple[dict[str, Any], ...] = ()
    """How each rank was set up: segments, schedule, N, DP.sync and gathers; empty where a system does not say."""
    action_s: float | None = None
    """By how much a compute action takes longer than its layers; None where a system does not say."""
    timelines: tuple[tuple[Sequence[Any], ...], ...] = ()
    """The last step's records of each rank, for fold3d.observe.timeline; empty unless asked for."""

    @property
    def is_calm(self) -> bool:
        """Whether the machine's host left the cores alone."""
        return self.stolen <= MAX_STOLEN

    def chosen(self) -> str:
        """Returns rank 0's set-up as text."""
        if not self.choices:
            return "nothing"
        one = self.choices[0]
        ways = ", ".join(f"{one['modes'].count(way)} {way}" for way in sorted(set(one["modes"])))
        early = f", first gathers {one['gather_order'][:4]}" if one["gather_order"] else ""
        return f"{one['segments']} segments, {one['schedule']} (N {one['group_size']}), buckets: {ways}{early}"


def counted(runs: Sequence[Run]) -> Sequence[Run]:
    """Returns the runs that count: the calm ones, or the calmest where none was calm."""
    return [run for run in runs if run.is_calm] or sorted(runs, key=lambda run: run.stolen)[:1]


@dataclass(kw_only=True, slots=True)
class Runs:
    """What has been measured so far on one network, by the name of what ran."""

    scenario: Scenario
    network: str
    """As text."""
    shaped: bool
    """Whether its links have a set speed."""
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    """What was said by those that broke."""

    def counted(self, name: str) -> Sequence[Run]:
        """Returns the runs of `name` that count."""
        return counted(self.runs.get(name, []))


@dataclass(kw_only=True, slots=True)
class Report(Runs):
    """A comparison of systems."""

    def median_s(self, system: str) -> float:
        """Returns the median over the repetitions that count of the seconds of a step."""
        return statistics.median(run.step_s for run in self.counted(system))

    def ratio(self, system: str) -> float:
        """Returns the median step time over the scenario's limit."""
        return self.median_s(system) / self.scenario.limit_s

    def ratio_to_reference(self, system: str) -> float | None:
        """Returns the median step time over that of fold3d-auto; None when that has not run."""
        return self.median_s(system) / self.median_s(REFERENCE) if REFERENCE in self.runs else None

    def of_library(self, library: str) -> list[str]:
        """Returns the systems of a library that have run, the fastest first."""
        return sorted((name for name in self.runs if _family(name).library == library), key=self.median_s)

    def rivals(self) -> dict[str, dict[str, float]]:
        """Returns, of the best of each family that trains with data parallelism alone, its closed form (rivals.py) and
        what its step would take if gloo did not send what it need not. Seconds and bytes."""
        best = {_family(name).schedule: name for name in reversed(self.of_library("data"))}
        found = {}
        for way, name in reversed(best.items()):
            costs = rival_costs(self.scenario, way)
            found[name] = {**asdict(costs), "without_emulation_s": self.median_s(name) - costs.emulated_s}
        return found

    def table(self) -> str:
        """Returns the comparison as text."""
        one = self.scenario
        rows = [
            f"scenario {one.name}: {one.title}",
            f"dp {one.dp} x pp {one.pp}, m {one.micro_batches}; {self.network}",
            f"limit {one.limit_s:.3f} s = max(compute {one.compute_s:.3f} + bubble {one.bubble_s:.3f}, "
            f"communication {one.communication_s:.3f}); DP.sync alone {one.dp_sync_s:.3f} s",
            "",
            f"{'system':28}{'step s':>8}{'least':>8}{'most':>8}{'/ auto':>8}{'/ limit':>9}{'sent MB':>9}"
            f"{'DP exposed':>11}{'PP ms':>7}{'PP|DP ms':>9}{'stolen':>8}{'runs':>5}",
        ]
        for name in sorted(self.runs, key=self.median_s):
            runs = self.counted(name)
            times = [run.step_s for run in runs]
            rows.append(
                f"{name:28}{self.median_s(name):8.3f}{min(times):8.3f}{max(times):8.3f}"
                f"{number(self.ratio_to_reference(name)):>8}{self.ratio(name):9.3f}"
                f"{median_text([run.sent_bytes for run in runs], 1e-6):>9}"
                f"{median_text([_exposed(run) for run in runs]):>11}"
                f"{median_text([run.latency.alone_ms for run in runs]):>7}"
                f"{median_text([run.latency.beside_dp_ms for run in runs]):>9}"
                f"{max(run.stolen for run in runs):8.1%}{f'{len(runs)}/{len(self.runs[name])}':>5}"
            )
        rows += [f"{name:28} FAILED {len(texts)} time(s)" for name, texts in self.failures.items()]
        rows += [f"{REFERENCE} chose {text}" for text in sorted({run.chosen() for run in self.runs.get(REFERENCE, [])})]
        rows += [_host_text(name, self.counted(name)) for name in self.runs if "@" in name]
        rows += [self._rival_text(name, rival) for name, rival in self.rivals().items()]
        theirs = self.of_library("torch")
        if theirs and REFERENCE in self.runs:
            ratio = number(self.ratio_to_reference(theirs[0]))
            rows += ["", f"best torch schedule ({theirs[0]}) / {REFERENCE}: {ratio}"]
        return "\n".join(rows)

    def _rival_text(self, name: str, rival: dict[str, float]) -> str:
        ours = self.median_s(REFERENCE) if REFERENCE in self.runs else None

        def beside(seconds: float) -> str:
            return f"{seconds:.3f} s" + (f" ({seconds / ours:.3f} x auto)" if ours else "")

        emulated = (
            f"; gloo's emulated reduce-scatter sends {rival['emulated_bytes'] / 1e6:.1f} MB more, "
            f"without it {beside(rival['without_emulation_s'])}"
            if rival["emulated_bytes"]
            else ""
        )
        return (
            f"{name}: {rival['sent_bytes'] / 1e6:.1f} MB must be sent{emulated}; "
            f"by formula, with all overlap there can be, {beside(rival['least_s'])}"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns everything, ready for json.dump."""
        one = self.scenario
        systems = {
            name: {
                "median_s": self.median_s(name),
                "ratio_to_auto": self.ratio_to_reference(name),
                "ratio_to_limit": self.ratio(name),
                "counted": len(self.counted(name)),
                "runs": [asdict(run) for run in runs],
            }
            for name, runs in self.runs.items()
        }
        limits = {name: getattr(one, name) for name in ("limit_s", "compute_s", "bubble_s", "communication_s")}
        return {
            "scenario": asdict(one),
            "limits": {**limits, "dp_sync_s": one.dp_sync_s},
            "network": self.network,
            "shaped": self.shaped,
            "systems": systems,
            "rivals": self.rivals(),
            "failures": self.failures,
        }


def _family(name: str) -> Family:
    return FAMILIES[name.partition("@")[0].partition(":")[0]]


def _host_text(name: str, runs: Sequence[Run]) -> str:
    """Returns what the thread that launches did with its time, of the rank with most of it."""
    asleep = statistics.median(run.asleep for run in runs)
    idle = [
        max(one["host_exposed_ms"] / one["step_ms"] for one in run.breakdowns if "host_exposed_ms" in one)
        for run in runs
        if any("host_exposed_ms" in one for one in run.breakdowns)
    ]
    more = f"; device idle for want of launches {statistics.median(idle):.1%}" if idle else ""
    return f"{name}: thread that launches waits {asleep:.1%} of the time{more}"


def _exposed(run: Run) -> float | None:
    """Milliseconds that the rank with most waited for DP.sync."""
    return max((breakdown["dp_exposed_ms"] for breakdown in run.breakdowns), default=None)


def number(value: float | None) -> str:
    """Returns a ratio as text."""
    return "-" if value is None else f"{value:.3f}"


def median_text(values: Sequence[float | None], scale: float = 1.0) -> str:
    """Returns the median of what is known as text."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known) * scale:.1f}" if known else "-"
