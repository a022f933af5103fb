"""Report: the medians of a comparison, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cluster.latency import Latency
from benchmarks.cluster.scenarios import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one system. Times in seconds per step."""

    step_s: float
    """Mean over the measured steps, of the slowest rank."""
    steps_s: tuple[tuple[float, ...], ...]
    """Each measured step of each rank."""
    sent_bytes: float | None
    """Bytes the busiest host sent per step, with headers; None when unshaped."""
    latency: Latency
    """Of the messages between stages in the last step."""


@dataclass(kw_only=True, slots=True)
class Report:
    """What has been measured so far, by system name."""

    scenario: Scenario
    network: str
    shaped: bool
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def median_s(self, system: str) -> float:
        """Returns the median over the repetitions of the seconds of a step."""
        return statistics.median(run.step_s for run in self.runs[system])

    def ratio(self, system: str) -> float:
        """Returns the median step time over the scenario's limit."""
        return self.median_s(system) / self.scenario.limit_s

    def fastest(self, prefix: str) -> str | None:
        """Returns the fastest system whose name begins with `prefix`; None when none has run."""
        return min((name for name in self.runs if name.startswith(prefix)), key=self.median_s, default=None)

    def table(self) -> str:
        """Returns the comparison as text."""
        one = self.scenario
        rows = [
            f"scenario {one.name}: {one.title}",
            f"dp {one.dp} x pp {one.pp}, m {one.micro_batches}; {self.network}",
            f"limit {one.limit_s:.3f} s = max(compute {one.compute_s:.3f} + bubble {one.bubble_s:.3f}, "
            f"communication {one.communication_s:.3f}); DP.sync alone {one.dp_sync_s:.3f} s",
            "",
            f"{'system':22}{'step s':>9}{'least':>9}{'most':>9}{'/ limit':>9}{'sent MB':>9}{'PP ms':>8}"
            f"{'PP|DP ms':>10}{'runs':>6}",
        ]
        for name in sorted(self.runs, key=self.median_s):
            runs = self.runs[name]
            times = [run.step_s for run in runs]
            rows.append(
                f"{name:22}{self.median_s(name):9.3f}{min(times):9.3f}{max(times):9.3f}{self.ratio(name):9.3f}"
                f"{_median([run.sent_bytes for run in runs], 1e-6):>9}"
                f"{_median([run.latency.alone_ms for run in runs]):>8}"
                f"{_median([run.latency.beside_dp_ms for run in runs]):>10}{len(runs):6}"
            )
        rows += [f"{name:22} FAILED {len(texts)} time(s)" for name, texts in self.failures.items()]
        ours, theirs = self.fastest("fold3d"), self.fastest("torch")
        if ours and theirs:
            quotient = self.median_s(theirs) / self.median_s(ours)
            rows += ["", f"best torch schedule ({theirs}) / best of fold3d ({ours}): {quotient:.3f}"]
        return "\n".join(rows)

    def as_json(self) -> dict[str, Any]:
        """Returns everything, ready for json.dump."""
        one = self.scenario
        systems = {
            name: {
                "median_s": self.median_s(name),
                "ratio_to_limit": self.ratio(name),
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
            "failures": self.failures,
        }


def _median(values: Sequence[float | None], scale: float = 1.0) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known) * scale:.1f}" if known else "-"
