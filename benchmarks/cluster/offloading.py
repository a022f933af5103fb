"""Offloading: what copies between an accelerator and its pool cost a step, and what leaves the accelerator's memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cluster.comparison import Effort
from benchmarks.cluster.grid import gather_order_of, measure_costs
from benchmarks.cluster.prediction import Costs, predict_step
from benchmarks.cluster.results.progress import say
from benchmarks.cluster.results.report import Run, counted
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import System, find_system
from benchmarks.cluster.testbed.ranks import RanksFailed

PLANNED = "fold3d-aiao-limited"
"""The system that says itself what to expect."""
SHARES = (1.0, 0.5)
"""Of the scenario's copy rate."""
BESIDE = {
    "fold3d-aiao-early": "",
    "fold3d-aiao-activations": "fold3d-aiao-early",
    "fold3d-aiao-blocks": "",
    "fold3d-aiao-boundaries": "fold3d-aiao-blocks",
    PLANNED: "fold3d-aiao-early",
}
"""System -> the one that computes the same, or what is planned before memory counts, and copies nothing; those without
copy nothing themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A system at a share of the scenario's copy rate."""

    share: float
    scenario: Scenario
    system: System

    @property
    def name(self) -> str:
        """For tables."""
        return self.system.name + (f" at {self.share:g}" if BESIDE[self.family] else "")

    @property
    def family(self) -> str:
        """The system's name without its segments."""
        return self.system.name.partition(":")[0]


def variants(scenario: Scenario) -> list[Variant]:
    """Returns what is measured; systems that copy nothing run at one rate."""
    found = []
    for share in SHARES:
        one = scenario.with_copy_rate(share)
        for name, beside in BESIDE.items():
            runs = scenario.memory_limit > 0 if name == PLANNED else beside or share == SHARES[0]
            if runs:
                found.append(Variant(share=share, scenario=one, system=find_system(name, one)))
    return found


@dataclass(kw_only=True, slots=True)
class OffloadReport:
    """What has been measured so far."""

    scenario: Scenario
    network: str
    shaped: bool
    costs: Costs | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)
    predicted_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def median_s(self, name: str) -> float:
        """Returns the median over the runs that count of the seconds of a step."""
        return statistics.median(run.step_s for run in counted(self.runs[name]))

    def slower(self, name: str) -> float | None:
        """Returns the step's time over that of the system that copies nothing, less 1; None for these themselves."""
        beside = BESIDE[name.partition(":")[0]]
        known = [other for other in self.runs if beside and other.partition(":")[0] == beside]
        return self.median_s(name) / self.median_s(known[0]) - 1 if known else None

    def error(self, name: str) -> float:
        """Returns the predicted time over the measured one, less 1."""
        return self.predicted_s[name] / self.median_s(name) - 1

    def most(self, name: str, key: str) -> float | None:
        """Returns an entry of the breakdown, of the rank with most of it; median."""
        values = [max((part.get(key, 0.0) for part in run.breakdowns), default=0.0) for run in counted(self.runs[name])]
        return statistics.median(values) if values else None

    def table(self) -> str:
        """Returns the comparison as text."""
        one = self.scenario
        rows = [
            f"scenario {one.name}: {one.title}",
            f"dp {one.dp} x pp {one.pp}, m {one.micro_batches}; {self.network}",
            f"copies at {one.copy_rate / 1e6:.1f} MB/s, both directions together: what a layer saves, "
            f"{one.saved_bytes} bytes, takes {one.copies_per_forward:.2f} of its forward",
            "",
            f"{'system':34}{'step s':>8}{'slower':>8}{'predicted':>10}{'error':>7}{'waited ms':>10}{'hidden ms':>10}"
            f"{'copied MB':>10}{'device MB':>10}{'pool MB':>8}{'stolen':>8}{'runs':>6}",
        ]
        for name, every in self.runs.items():
            runs = counted(every)
            slower = self.slower(name)
            rows.append(
                f"{name:34}{self.median_s(name):8.3f}{'-' if slower is None else f'{slower:.1%}':>8}"
                f"{self.predicted_s[name]:10.3f}{self.error(name):7.1%}"
                f"{self.most(name, 'offload_exposed_ms'):10.1f}{self.most(name, 'offload_hidden_ms'):10.1f}"
                f"{1e3 * (self.most(name, 'offload_gb') or 0.0):10.1f}{self.most(name, 'device_mb'):10.1f}"
                f"{self.most(name, 'pool_mb'):8.1f}{max(run.stolen for run in runs):8.1%}"
                f"{f'{len(runs)}/{len(every)}':>6}"
            )
        for name, every in self.runs.items():
            if name.startswith(PLANNED):
                chosen = {str(run.choices[0]["memory"]) for run in every if run.choices}
                rows += [f"{name} chose {text}" for text in sorted(chosen)]
        rows += [f"{name:34}FAILED {len(texts)} time(s)" for name, texts in self.failures.items()]
        return "\n".join(rows)

    def as_json(self) -> dict[str, Any]:
        """Returns everything, ready for json.dump."""
        return {
            "scenario": asdict(self.scenario),
            "copies_per_forward": self.scenario.copies_per_forward,
            "network": self.network,
            "shaped": self.shaped,
            "costs": None if self.costs is None else asdict(self.costs),
            "offloading": {
                name: {
                    "median_s": self.median_s(name),
                    "slower": self.slower(name),
                    "predicted_s": self.predicted_s[name],
                    "error": self.error(name),
                    "counted": len(counted(runs)),
                    "runs": [asdict(run) for run in runs],
                }
                for name, runs in self.runs.items()
            },
            "failures": self.failures,
        }


def measure_offloading(report: OffloadReport, session: Session, effort: Effort) -> None:
    """Fills `report`: all variants in turn, several times; predictions get what a run without gradients shows."""
    started = time.monotonic()
    try:
        report.costs = measure_costs(report.scenario, session, effort)
    except RanksFailed as error:
        report.failures["costs"] = [str(error)]
        return
    for repetition in range(effort.repetitions):
        for variant in variants(report.scenario):
            try:
                run = session.run(variant.scenario, variant.system, steps=effort.steps, warm_up=effort.warm_up)
            except RanksFailed as error:
                report.failures.setdefault(variant.name, []).append(str(error))
                continue
            report.runs.setdefault(variant.name, []).append(run)
            report.predicted_s[variant.name] = _predicted_s(variant, run, report.costs)
            minutes = (time.monotonic() - started) / 60
            say(f"repetition {repetition + 1} {variant.name}: {run.step_s:.3f} s; {minutes:.1f} min so far")


def _predicted_s(variant: Variant, run: Run, costs: Costs) -> float:
    if variant.family != PLANNED:
        return predict_step(variant.scenario, variant.system, costs, gather_order_of(run))
    return max((part.get("predicted_step_ms", 0.0) for part in run.breakdowns), default=0.0) / 1e3
