"""Grid: the simulator's step time beside the measured one, over many settings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.cluster.comparison import Effort
from benchmarks.cluster.prediction import PAYLOAD, Costs, predict_step
from benchmarks.cluster.results.progress import say
from benchmarks.cluster.results.report import Run, counted
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import System, find_system
from benchmarks.cluster.testbed.ranks import RanksFailed

FOLDED = ("fold3d-aiao-zero1", "fold3d-aiao-early", "fold3d-interleaved-npp", "fold3d-interleaved-serial")
SINGLE = "fold3d-1f1b"
CALIBRATION = "fold3d-aiao-early"
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "A": ((4, 8), (2, 4, 8)),
    "B": ((8, 16), (2, 4)),
    "D": ((8,), (2, 4)),
    "smoke": ((2,), (2,)),
}
"""Scenario -> numbers of micro-batches, numbers of segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One setting."""

    base: str
    scenario: Scenario
    system: System

    @property
    def name(self) -> str:
        """For tables."""
        one = self.scenario
        return f"{self.base}: pp {one.pp}, m {one.micro_batches}, {self.system.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell's outcome; seconds."""

    cell: Cell
    predicted_s: float
    measured_s: float
    stolen: float
    """As Run.stolen, of the worst run that counts."""
    counted: int
    """Runs that count."""
    runs: int

    @property
    def error(self) -> float:
        """Relative, positive when the simulator says too much."""
        return self.predicted_s / self.measured_s - 1


def cells(base: str, scenario: Scenario) -> Iterator[Cell]:
    """Yields the settings of scenario `base`, here perhaps thinned; a micro-batch takes the same time however many
    there are."""
    micro_batches, segments = SHAPES[base]
    for m in micro_batches:
        one = with_micro_batches(scenario, m)
        for number in segments:
            for family in FOLDED:
                yield Cell(base=base, scenario=one, system=find_system(f"{family}:{number}", one))
        yield Cell(base=base, scenario=one, system=find_system(SINGLE, one))


def with_micro_batches(scenario: Scenario, micro_batches: int) -> Scenario:
    """Returns the scenario with more or fewer micro-batches of the same length."""
    factor = micro_batches / scenario.micro_batches
    return replace(
        scenario,
        micro_batches=micro_batches,
        forward_s=scenario.forward_s * factor,
        backward_s=scenario.backward_s * factor,
    )


@dataclass(kw_only=True, slots=True)
class GridReport:
    """What has been measured so far."""

    networks: dict[str, str] = field(default_factory=dict)
    """By scenario, as text."""
    shaped: bool = False
    costs: dict[str, Costs] = field(default_factory=dict)
    results: list[Measured] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)

    @property
    def network(self) -> str:
        """All of them."""
        return "; ".join(f"{base}: {network}" for base, network in self.networks.items())

    def errors(self) -> list[float]:
        """Returns the absolute relative errors, ascending."""
        return sorted(abs(one.error) for one in self.results)

    def table(self) -> str:
        """Returns the comparison as text."""
        rows = [f"the simulator against {self.network}", ""]
        rows += [
            f"scenario {base}: {costs.latency_s * 1e3:.2f} ms a message, {costs.action_s * 1e6:.0f} us a compute action"
            f", {costs.step_s * 1e3:.1f} ms a step"
            for base, costs in self.costs.items()
        ]
        rows += ["", f"{'cell':52}{'predicted s':>12}{'measured s':>12}{'error':>9}{'stolen':>8}{'runs':>6}"]
        for one in self.results:
            rows.append(
                f"{one.cell.name:52}{one.predicted_s:12.3f}{one.measured_s:12.3f}{one.error:9.1%}{one.stolen:8.1%}"
                f"{f'{one.counted}/{one.runs}':>6}"
            )
        rows += [f"{name:52} FAILED" for name in self.failures]
        errors = self.errors()
        if errors:
            rows += ["", f"{len(errors)} cells: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}"]
        return "\n".join(rows)

    def as_json(self) -> dict[str, Any]:
        """Returns everything, ready for json.dump."""
        errors = self.errors()
        return {
            "network": self.network,
            "shaped": self.shaped,
            "costs": {base: asdict(costs) for base, costs in self.costs.items()},
            "median_error": statistics.median(errors) if errors else None,
            "worst_error": errors[-1] if errors else None,
            "grid": [
                {
                    "scenario": asdict(one.cell.scenario),
                    "system": one.cell.system.name,
                    "predicted_s": one.predicted_s,
                    "measured_s": one.measured_s,
                    "error": one.error,
                    "stolen": one.stolen,
                    "counted": one.counted,
                    "runs": one.runs,
                }
                for one in self.results
            ],
            "failures": self.failures,
        }


def measure_grid(report: GridReport, base: str, scenario: Scenario, session: Session, effort: Effort) -> None:
    """Adds the cells of scenario `base`, here perhaps thinned, to `report`, once its costs are measured."""
    all_cells = list(cells(base, scenario))
    started = time.monotonic()
    for done, cell in enumerate(all_cells, start=1):
        try:
            if base not in report.costs:
                report.costs[base] = measure_costs(scenario, session, effort)
            every = [
                session.run(cell.scenario, cell.system, steps=effort.steps, warm_up=effort.warm_up)
                for _ in range(effort.repetitions)
            ]
        except RanksFailed as error:
            report.failures.setdefault(cell.name, []).append(str(error))
            continue
        runs = counted(every)
        one = Measured(
            cell=cell,
            predicted_s=predict_step(cell.scenario, cell.system, report.costs[base], gather_order_of(runs[-1])),
            measured_s=statistics.median(run.step_s for run in runs),
            stolen=max(run.stolen for run in runs),
            counted=len(runs),
            runs=len(every),
        )
        report.results.append(one)
        left = (time.monotonic() - started) / done * (len(all_cells) - done)
        say(f"[{done}/{len(all_cells)} of {base}] {cell.name}: error {one.error:.1%}; {left / 60:.1f} min left")


def measure_costs(scenario: Scenario, session: Session, effort: Effort) -> Costs:
    """Returns what the scenario does not say of this network and machine, from a run without gradients.

    Raises: RanksFailed.
    """
    alone = replace(scenario, gradient_bytes=0)
    run = session.run(alone, find_system(CALIBRATION, alone), steps=effort.steps, warm_up=effort.warm_up)
    return costs_of(alone, run)


def costs_of(scenario: Scenario, run: Run) -> Costs:
    """Returns the costs that a run of CALIBRATION shows; the scenario has no gradients."""
    bytes_s = scenario.activation_bytes * 8 / (scenario.rate_mbit * 1e6 * PAYLOAD)
    pipeline = Costs(
        latency_s=max(0.0, (run.latency.alone_ms or 0.0) / 1e3 - bytes_s),
        action_s=max(0.0, run.action_s or 0.0),
    )
    simulated = predict_step(scenario, find_system(CALIBRATION, scenario), pipeline)
    return replace(pipeline, step_s=max(0.0, run.step_s - simulated))


def gather_order_of(run: Run) -> list[list[int]] | None:
    """Returns the order of early gathers of every stage in a run; None where nothing is gathered early."""
    orders = [choice["gather_order"] for choice in run.choices if choice["replica"] == 0]
    return orders if any(orders) else None
