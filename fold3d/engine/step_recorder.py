"""StepRecorder: what happened in a rank's last runs, and how long it took."""

from __future__ import annotations

from collections.abc import Callable

from fold3d import _C
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.faults.progress import Progress
from fold3d.observe.recorded_run import RecordedRun
from fold3d.observe.step_breakdown import MEET, TP_SYNC, RawRecord, StepBreakdown, make_breakdown
from fold3d.plan.simulator import Prediction


class StepRecorder:
    """Collects the records of the executor, of DP.sync and of small exchanges; of TP.sync its sums, and its records in
    steps for which somebody asks: they are thousands.

    On a device whose streams tell the time the records are those of the device: they belong to the run in which the
    device ended what they tell of, and are known when it has, a step later. Nobody waits for them but those who ask.
    """

    def __init__(
        self,
        executor: _C.Executor,
        sync: GradientSync,
        arbiter: _C.NicArbiter,
        progress: Progress,
        clock: _C.StreamClock,
        stage: int,
        shards: _C.TensorSync | None = None,
    ) -> None:
        """Args:
        clock: that the records are made with.
        shards: counts TP.sync; None: nobody does.
        """
        self._executor, self._sync, self._arbiter, self._progress = executor, sync, arbiter, progress
        self._clock, self._stage, self._shards = clock, stage, shards
        self._loose: list[RawRecord] = []  # of no run yet
        self._is_closed = False
        self._runs = [self._new(trains=False)]  # the last one, before it those of training whose times are not known

    @property
    def records(self) -> list[RawRecord]:
        """What is known of the step so far."""
        self._collect()
        return [*self._runs[-1].records, *self._loose]

    def begin(self, *, trains: bool) -> None:
        """A run begins."""
        self._collect()
        self._clock.anchor()
        run = self._new(trains=trains)
        self._runs[-1].follow(run.begin)
        self._runs = [*(one for one in self._runs if one.trains and not one.is_settled), run]
        oldest = self._runs[0].begin.ns()
        if oldest is not None:  # what is left of runs before, nobody asked for
            self._loose = [record for record in self._loose if record[3] >= oldest]

    def keep_tp_sync(self, keep: bool) -> None:
        """Whether records have every exchange of TP.sync from now on; at first they have not."""
        if self._shards is not None:
            self._shards.keep_records(keep)

    def extend(self) -> None:
        """What happened since the run began, or was extended, belongs to its step."""
        run = self._runs[-1]
        run.extend(self._clock.now(), self._shards_now())
        if not self._progress.life.is_closed:
            self._collect()
            run.count(self._executor.offload_counters())

    def take_steps(self) -> list[RecordedRun]:
        """Returns the steps of training that nobody was told of and whose times are known: on the CPU the last one, on
        a device the one before, because it may still work at the last.

        Does not wait: whoever begins another step has the loss of the last one, which comes after all of those before.
        """
        over = [run for run in self._runs if run.trains and (run.is_over or not self._clock.is_of_device)]
        for run in over:
            self._settle(run)
        steps = [run for run in over if not run.is_told]
        for run in steps:
            run.tell()
        return steps

    def forget_steps(self) -> None:
        """Nobody is to be told of the steps so far: those that come will be run in another way."""
        for run in self._runs:
            run.tell()

    def breakdown_later(self, expected: Prediction | None) -> Callable[[], StepBreakdown]:
        """Returns what makes the breakdown of where the time of the last step went, at any later time. On a device it
        waits then for what the step has left to do.

        Args:
            expected: what the simulator says of it.
        """
        run = self._runs[-1]
        arbiter = {name: count - run.counted[name] for name, count in self._arbiter.counters().items()}
        step_ms, predicted = None, None
        if expected is not None:
            step_ms, predicted = expected.step_ms, expected.ranks[self._stage]
        shards = None if self._shards is None else run.shards

        def snapshot() -> Callable[[], StepBreakdown]:
            self._settle(run)
            records, bounds, offload = tuple(run.records), run.bounds, run.offload
            return lambda: make_breakdown(records, *bounds, step_ms, arbiter, predicted, shards, offload)

        return (lambda: snapshot()()) if self._clock.is_of_device else snapshot()

    def close(self) -> None:
        """The parts that record are about to be closed."""
        if self._clock.is_of_device and self._progress.life.failure is None:
            for run in self._runs:
                self._settle(run)
        self._is_closed = True

    def _new(self, *, trains: bool) -> RecordedRun:
        counted, shards = self._arbiter.counters(), self._shards_now()
        return RecordedRun(trains=trains, begin=self._clock.now(), counted=counted, shards=shards)

    def _settle(self, run: RecordedRun) -> None:
        """Gives the run, and those before it, what is theirs, once the device has come to its end."""
        if self._is_closed or run.is_settled:
            return
        before = self._runs[: self._runs.index(run)] if run in self._runs else []
        for one in (*before, run):
            if one.is_settled:
                continue
            until = one.until(self._clock.now())
            self._collect()
            mine = [record for record in self._loose if record[3] <= until]
            self._loose = [record for record in self._loose if record[3] > until]
            one.settle(mine)

    def _shards_now(self) -> dict[str, int]:
        return {} if self._shards is None else self._shards.counters()

    def _collect(self) -> None:
        own = [*self._executor.take_spans(), *self._executor.take_records()]
        own += [("wait", MEET, start, end, 0) for start, end in self._progress.take_met()]
        if self._shards is not None:
            own += [("wait", TP_SYNC, start, end, 0) for start, end in self._shards.take_waits()]
            own += [("tp_sync", kind, start, end, size) for kind, _, start, end, size in self._shards.take_records()]
        self._loose += own + self._sync.take_records()
