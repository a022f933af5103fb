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
        self._lowered: dict[tuple[Order, int, tuple[bool, ...], tuple[bool, ...], float], _C.Schedule] = {}

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

    def program(self, order: Order, layout: Layout) -> _C.Schedule:
        """Returns the compute actions, with what `layout` computes again and copies to the pool.

        Raises: ConfigError as fold3d.schedule.generate.
        """
        chunks = len(layout.ranges)
        made = self.schedule(order, num_segments(chunks, self.job.pp))
        again, moves = layout.spared.recompute.without_graph(chunks), layout.spared.offloaded(chunks)
        if not any(again) and not moves:
            return made
        share = layout.spared.offload.share
        key = (order, num_segments(chunks, self.job.pp), tuple(again), tuple(moves), share)
        if key not in self._lowered:
            self._lowered[key] = schedules.lower(
                made, reduce=False, recompute=again, offload=moves, offload_share=share
            )
        return self._lowered[key]

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
    ) -> _C.TrainingStep:
        """Simulates training steps.

        Args:
            modes: per stage, "early", "zero1" or "serial" of each bucket; either all are serial or none.
            early_gathers: that a stage may begin before its last reduce-scatter is done, -1 for any number.
            spans: needed for `memory`.
            gather_order: per stage its early buckets in the order of their gathers; None: as the network becomes idle.
        """
        made = self.program(order, layout)
        cluster = self.job.cluster(max(layout.activation_bytes))
        model = cluster_model(layout, cluster, pp=self.job.pp, dp_sync=kind_of(modes), modes=modes)
        if model.dp_sync == "early":
            if gather_order is not None:
                model.gather_order = [list(numbers) for numbers in gather_order]
            else:
                model.early_gathers = early_gathers
        return _C.simulate_step(made, model, breakdown=breakdown, spans=spans)

    def memory(self, layout: Layout, order: Order, modes: Modes, step: _C.TrainingStep) -> list[_C.StageMemory]:
        """Returns the bytes of each stage over `step`, which was run with spans."""
        return _C.memory_curves(self.program(order, layout), memory_model(self.job, layout, modes), step)
