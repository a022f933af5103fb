"""StepRecorder: what happened in a rank's last run, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from fold3d import _C
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.faults.progress import Progress
from fold3d.observe.step_breakdown import MEET, NS_PER_MS, TP_SYNC, RawRecord, StepBreakdown, make_breakdown
from fold3d.plan.measured import Expected


class StepRecorder:
    """Collects the records of the executor, of DP.sync and of small exchanges, for one step at a time; of TP.sync its
    sums, and its records in steps for which somebody asks: they are thousands."""

    def __init__(
        self,
        executor: _C.Executor,
        sync: GradientSync,
        arbiter: _C.NicArbiter,
        progress: Progress,
        stage: int,
        shards: _C.TensorSync | None = None,
    ) -> None:
        """Args:
        shards: counts TP.sync; None: nobody does.
        """
        self._executor, self._sync, self._arbiter, self._progress = executor, sync, arbiter, progress
        self._stage, self._shards = stage, shards
        self._shards_before = self._shards_after = self._shards_now()
        self._offload: _C.OffloadCounters | None = None
        self._bounds = (0, 0)
        self._records: list[RawRecord] = []
        self._counted = arbiter.counters()  # by the arbiter before the last run
        self._trains = False

    @property
    def records(self) -> list[RawRecord]:
        """What is known of the step so far."""
        return self._records

    @property
    def step_ms(self) -> float:
        """The step's length so far."""
        return (self._bounds[1] - self._bounds[0]) / NS_PER_MS

    @property
    def exposed_tp_ms(self) -> float | None:
        """For how long the rank waited for TP.sync in the step so far; None: nobody counts it."""
        if self._shards is None:
            return None
        return (self._shards_after["waited_ns"] - self._shards_before["waited_ns"]) / NS_PER_MS

    @property
    def holds_step(self) -> bool:
        """Whether the last run was a step of training."""
        return self._trains

    def begin(self, *, trains: bool) -> None:
        """A run begins; what is still recorded of the one before, nobody asked for."""
        self._trains = trains
        self._take()
        self._records = []
        self._counted = self._arbiter.counters()
        self._shards_before = self._shards_after = self._shards_now()
        self._bounds = (time.monotonic_ns(),) * 2

    def keep_tp_sync(self, keep: bool) -> None:
        """Whether records have every exchange of TP.sync from now on; at first they have not."""
        if self._shards is not None:
            self._shards.keep_records(keep)

    def extend(self) -> None:
        """What happened since the run began, or was extended, belongs to its step."""
        self._bounds = (self._bounds[0], time.monotonic_ns())
        self._shards_after = self._shards_now()
        if not self._progress.life.is_closed:
            self._records += self._take()
            self._offload = self._executor.offload_counters()

    def extend_by_waits(self) -> None:
        """Whoever read weights after the step waited for its DP.sync; what else they did is not the step's."""
        start, end = self._bounds
        later = [record for record in self._take() if record[:2] != ("wait", MEET) or record[2] < end]
        waited = sum(stop - begin for lane, _, begin, stop, _ in later if lane == "wait" and begin >= end)
        self._bounds = (start, end + waited)
        self._records += later

    def breakdown_later(self, expected: Expected | None) -> Callable[[], StepBreakdown]:
        """Returns what makes the breakdown of where the time of the last step went, at any later time.

        Args:
            expected: what the simulator says of it.
        """
        self.extend_by_waits()
        arbiter = {name: count - self._counted[name] for name, count in self._arbiter.counters().items()}
        step_ms, predicted = None, None
        if expected is not None:
            step_ms, predicted = expected.step_ms, expected.stages[self._stage]
        shards = None
        if self._shards is not None:
            shards = {name: count - self._shards_before[name] for name, count in self._shards_after.items()}
        return partial(
            make_breakdown, tuple(self._records), *self._bounds, step_ms, arbiter, predicted, shards, self._offload
        )

    def _shards_now(self) -> dict[str, int]:
        return {} if self._shards is None else self._shards.counters()

    def _take(self) -> list[RawRecord]:
        own = [*self._executor.take_spans(), *self._executor.take_records()]
        own += [("wait", MEET, start, end, 0) for start, end in self._progress.take_met()]
        if self._shards is not None:
            own += [("wait", TP_SYNC, start, end, 0) for start, end in self._shards.take_waits()]
            own += [("tp_sync", kind, start, end, size) for kind, _, start, end, size in self._shards.take_records()]
        return own + self._sync.take_records()
