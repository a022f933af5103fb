"""Preemption: what messages between stages and DP.sync cost each other, with and without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cluster.comparison import Effort
from benchmarks.cluster.results.progress import say
from benchmarks.cluster.results.report import Runs, number
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import System, find_system
from benchmarks.cluster.testbed.ranks import RanksFailed

IDLE, ORDERED, UNORDERED = "no DP.sync", "preemption on", "preemption off"


def variants(scenario: Scenario) -> dict[str, tuple[Scenario, System]]:
    """Returns what is compared: without gradients, with them and messages first, with them first come, first served."""
    load = find_system("load", scenario)
    return {
        IDLE: (replace(scenario, gradient_bytes=0), load),
        ORDERED: (scenario, load),
        UNORDERED: (scenario, find_system("load-unordered", scenario)),
    }


@dataclass(kw_only=True, slots=True)
class PreemptionReport(Runs):
    """A comparison of the variants."""

    def message_ms(self, variant: str) -> float | None:
        """Returns the latency of messages: on an idle network, or while DP.sync is under way; median."""
        latencies = [run.latency for run in self.counted(variant)]
        return _median([one.alone_ms if variant == IDLE else one.beside_dp_ms for one in latencies])

    def dp_sync_ms(self, variant: str) -> float | None:
        """Returns how long a rank is in DP.sync per step, median."""
        return None if variant == IDLE else _median([run.latency.dp_sync_ms for run in self.counted(variant)])

    def ratio_to_idle(self, variant: str) -> float | None:
        """Returns the latency over that of an idle network."""
        return _ratio(self.message_ms(variant), self.message_ms(IDLE))

    def ratio_of_dp_sync(self, variant: str) -> float | None:
        """Returns the time in DP.sync over that without preemption."""
        return _ratio(self.dp_sync_ms(variant), self.dp_sync_ms(UNORDERED))

    def table(self) -> str:
        """Returns the comparison as text."""
        one = self.scenario
        rate = one.rate_mbit * 1e6
        rows = [
            f"scenario {one.name}: {one.title}",
            f"dp {one.dp} x pp {one.pp}, m {one.micro_batches}; {self.network}",
            f"a message: {one.activation_bytes} bytes, {one.activation_bytes * 8e3 / rate:.1f} ms at full rate; "
            f"DP.sync: {one.dp_sync_s * 1e3:.0f} ms at full rate",
            "",
            f"{'':16}{'message ms':>11}{'/ idle':>8}{'messages':>10}{'DP.sync ms':>12}{'/ off':>8}{'step s':>9}"
            f"{'stolen':>8}{'runs':>6}",
        ]
        for name, every in self.runs.items():
            runs = self.counted(name)
            count = sum(run.latency.messages[name != IDLE] for run in runs)
            rows.append(
                f"{name:16}{_text(self.message_ms(name), 2):>11}{number(self.ratio_to_idle(name)):>8}{count:10}"
                f"{_text(self.dp_sync_ms(name), 0):>12}{number(self.ratio_of_dp_sync(name)):>8}"
                f"{statistics.median(run.step_s for run in runs):9.3f}{max(run.stolen for run in runs):8.1%}"
                f"{f'{len(runs)}/{len(every)}':>6}"
            )
        rows += [f"{name:16}FAILED {len(texts)} time(s)" for name, texts in self.failures.items()]
        return "\n".join(rows)

    def as_json(self) -> dict[str, Any]:
        """Returns everything, ready for json.dump."""
        return {
            "scenario": asdict(self.scenario),
            "network": self.network,
            "shaped": self.shaped,
            "preemption": {
                name: {
                    "message_ms": self.message_ms(name),
                    "ratio_to_idle": self.ratio_to_idle(name),
                    "dp_sync_ms": self.dp_sync_ms(name),
                    "ratio_of_dp_sync": self.ratio_of_dp_sync(name),
                    "counted": len(self.counted(name)),
                    "runs": [asdict(run) for run in runs],
                }
                for name, runs in self.runs.items()
            },
            "failures": self.failures,
        }


def measure_preemption(report: PreemptionReport, session: Session, effort: Effort) -> None:
    """Fills `report`: all variants in turn, several times."""
    started = time.monotonic()
    for repetition in range(effort.repetitions):
        for name, (scenario, system) in variants(report.scenario).items():
            try:
                run = session.run(scenario, system, steps=effort.steps, warm_up=effort.warm_up)
                report.runs.setdefault(name, []).append(run)
                outcome = f"{run.step_s:.3f} s"
            except RanksFailed as error:
                report.failures.setdefault(name, []).append(str(error))
                outcome = "FAILED"
            say(f"repetition {repetition + 1} {name}: {outcome}; {(time.monotonic() - started) / 60:.1f} min so far")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
