"""Trials: simulates candidates of the search, each with one call of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.plan.cluster_model import cluster_model, kind_of
from fold3d.plan.job import Job
from fold3d.plan.layout import Layout
from fold3d.plan.memory.model import memory_model
from fold3d.plan.strategy import Modes
from fold3d.topology import num_segments


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule by name."""

    name: str
    group_size: int | None = None


class Trials:
    """Runs the simulator for one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._schedules: dict[tuple[Order, int], _C.Schedule] = {}
        self._again: dict[tuple[Order, int, tuple[bool, ...]], _C.Schedule] = {}

    def schedule(self, order: Order, segments: int) -> _C.Schedule:
        """Returns the compute actions. Raises: ConfigError as fold3d.schedule.generate."""
        key = (order, segments)
        if key not in self._schedules and order.name.endswith(".csv"):
            self._schedules[key] = schedules.load_csv(order.name)
        elif key not in self._schedules:
            self._schedules[key] = schedules.generate(
                order.name,
                pp=self.job.pp,
                segments=segments,
                micro_batches=self.job.micro_batches,
                group_size=order.group_size,
            )
        return self._schedules[key]

    def program(self, order: Order, segments: int, recompute: Sequence[bool] = ()) -> _C.Schedule:
        """Returns what is simulated. Raises: ConfigError as fold3d.schedule.generate.

        Args:
            recompute: of every chunk, as in fold3d.schedule.lower.
        """
        made = self.schedule(order, segments)
        if not any(recompute):
            return made
        key = (order, segments, tuple(recompute))
        if key not in self._again:
            self._again[key] = schedules.lower(made, reduce=False, recompute=recompute)
        return self._again[key]

    def run(
        self,
        layout: Layout,
        order: Order,
        modes: Modes,
        *,
        early_gathers: int = -1,
        gather_order: Sequence[Sequence[int]] | None = None,
        breakdown: bool = False,
        spans: bool = True,
        recompute: Sequence[bool] = (),
    ) -> _C.TrainingStep:
        """Simulates training steps.

        Args:
            modes: per stage, "early", "zero1" or "serial" of each bucket; either all are serial or none.
            early_gathers: that a stage may begin before its last reduce-scatter is done, -1 for any number.
            recompute: of every chunk whether its forward runs again before its backward; empty: of none.
            spans: needed for `memory`.
            gather_order: per stage its early buckets in the order of their gathers; None: as the network becomes idle.
        """
        made = self.program(order, num_segments(len(layout.ranges), self.job.pp), recompute)
        cluster = self.job.cluster(max(layout.activation_bytes))
        model = cluster_model(layout, cluster, pp=self.job.pp, dp_sync=kind_of(modes), modes=modes)
        if model.dp_sync == "early":
            if gather_order is not None:
                model.gather_order = [list(numbers) for numbers in gather_order]
            else:
                model.early_gathers = early_gathers
        return _C.simulate_step(made, model, breakdown=breakdown, spans=spans)

    def memory(
        self, layout: Layout, order: Order, modes: Modes, step: _C.TrainingStep, *, recompute: Sequence[bool] = ()
    ) -> list[_C.StageMemory]:
        """Returns the bytes of each stage over `step`, which was run with spans and the same `recompute`."""
        made = self.program(order, num_segments(len(layout.ranges), self.job.pp), recompute)
        return _C.memory_curves(made, memory_model(self.job, layout, modes), step)
