"""Steps of one rank that follow each other without a flush: Flow, PipeDream-2BW's; MicroBatchFlow, PipeDream's."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fold3d import schedule as schedules
from fold3d.data_parallel.late.each_micro_batch import EachMicroBatch
from fold3d.data_parallel.late.without_flush import WithoutFlush
from fold3d.engine.pipeline import Pipeline
from fold3d.engine.step_recorder import StepRecorder
from fold3d.errors import ConfigError
from fold3d.faults.progress import Progress
from fold3d.schedule import Schedule
from fold3d.stage.micro_batch import MicroBatch
from fold3d.topology import Topology


class Flow:
    """All ranks of the job make the same calls, and none waits between two steps for another one to end its own."""

    def __init__(
        self, topology: Topology, pipeline: Pipeline, sync: WithoutFlush, recorder: StepRecorder, progress: Progress
    ) -> None:
        self._topology, self._pipeline, self._sync = topology, pipeline, sync
        self._recorder, self._progress = recorder, progress
        self._lists = functools.cache(
            lambda count: schedules.without_flush("1f1b", pp=topology.pp, micro_batches=count)
        )
        self._count = 0
        self._loss: Tensor | None = None  # of a step that a drain has ended

    def takes(self, micro_batches: int) -> bool:
        """Whether a step of so many runs without a flush: else backwards would come later than the next update."""
        return micro_batches >= self._topology.pp

    def run(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Runs a step's forwards, what is left of the backwards of the step before, and as many of its own.

        Returns: the replica's loss of the step before, fp64 scalar, on each of its ranks; 0 in the first step.
        """
        if self._sync.is_flowing and self._count != len(micro_batches):
            self.drain()
        self._count = len(micro_batches)
        lists, goes_on = self._lists(self._count), self._sync.is_flowing
        self._sync.begin_slice(self._count, (self._topology.pp_rank,))
        losses = self._run(lists[1] if goes_on else lists[0], micro_batches, goes_on=goes_on, is_left=True)
        values = self._pipeline.shares_of(losses, micro_batches)
        with self._progress.during("the gradient norm of the step before", meets=True):
            told = self._sync.end_slice(values)
        return self.take_loss() if told is None else self._pipeline.loss_in(told)

    def drain(self) -> None:
        """Runs what is left of the last step, if anything is."""
        if not self._sync.is_flowing:
            return
        self._sync.begin_drain()
        self._run(self._lists(self._count)[2], (), goes_on=True, is_left=False)
        with self._progress.during("the gradient norm of the last step", meets=True):
            self._loss = self._pipeline.loss_in(self._sync.end_drain())

    def take_loss(self) -> Tensor:
        """Returns the loss of the step that the last drain ended, if nobody had it yet, else 0."""
        loss, self._loss = self._loss, None
        return torch.zeros((), dtype=torch.get_default_dtype()) if loss is None else loss

    def _run(self, lists: Schedule, micro_batches: Sequence[MicroBatch], *, goes_on: bool, is_left: bool) -> list[Any]:
        try:
            return self._pipeline.run(lists, micro_batches, backward=True, goes_on=goes_on, is_left=is_left)
        finally:
            self._recorder.extend()


class MicroBatchFlow:
    """Steps of one micro-batch, with an update after each (PipeDream); calls as `Flow`'s."""

    def __init__(
        self, topology: Topology, pipeline: Pipeline, sync: EachMicroBatch, recorder: StepRecorder, progress: Progress
    ) -> None:
        self._topology, self._pipeline, self._sync = topology, pipeline, sync
        self._recorder, self._progress = recorder, progress
        self._lists = functools.cache(lambda steps: schedules.by_micro_batch(topology.pp, steps))
        self._numbers = topology.pp  # of micro-batches, which come again and again
        self._steps = 0  # since the last drain
        self._values: deque[Tensor] = deque()  # of micro-batches whose backwards are to come
        self._loss: Tensor | None = None  # of those of which a drain has told

    def takes(self, micro_batches: int) -> bool:
        """Whether a step of so many runs without a flush. Raises: ConfigError for another number than 1."""
        if micro_batches != 1:
            raise ConfigError(
                f"weight_versions updates weights after each micro-batch, and this step has {micro_batches}; give "
                "each step one (of the Trainer: gradient_accumulation_steps=1)"
            )
        return True

    def run(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Runs the micro-batch's forward, and the backward of the one that is as many behind as stages come after this.

        Returns: the replica's loss of the micro-batch pp before it, fp64 scalar, on each of its ranks; after a drain
            also that of those which it has ended.
        """
        step, self._steps = self._steps, self._steps + 1
        alike, number, brings = self._alike(step), step % self._numbers, self._backward_of(step) >= 0
        self._sync.begin_slice(number, brings=brings)
        losses = self._run(self._lists(alike + 1)[alike], micro_batches, number, goes_on=step > 0, is_left=True)
        self._values.append(self._pipeline.shares_of(losses, micro_batches))
        if brings:
            self._sync.end_slice(self._values.popleft())
        # By now all stages have done the backward of micro-batch step - pp: nobody waits for another rank's step.
        if step >= self._numbers:
            self._tell()
        return self.take_loss()

    def drain(self) -> None:
        """Runs the backwards that are left, each with its update."""
        count, alike, rest = self._steps, self._alike(self._steps), self._numbers - 1
        if not count:
            return
        for more in range(rest):
            brings = 0 <= self._backward_of(count + more) < count
            self._sync.begin_slice(None, brings=brings)
            self._run(self._lists(alike)[alike + more], (), 0, goes_on=True, is_left=more + 1 < rest)
            if brings:
                self._sync.end_slice(self._values.popleft())
                self._sync.update()
                self._sync.updated()
        while self._sync.untold:
            self._tell()
        self._steps = 0

    def take_loss(self) -> Tensor:
        """Returns the losses of which this rank has been told since the last call, added up; else 0."""
        loss, self._loss = self._loss, None
        return torch.zeros((), dtype=torch.get_default_dtype()) if loss is None else loss

    def _alike(self, step: int) -> int:
        """Returns the first step, or number of steps, with the same lists: once the pipeline is full they repeat."""
        return step if step < 2 * self._numbers else self._numbers + step % self._numbers

    def _backward_of(self, step: int) -> int:
        return step - (self._topology.pp - 1 - self._topology.pp_rank)

    def _tell(self) -> None:
        with self._progress.during("the loss and the gradient norm of a micro-batch before", meets=True):
            loss = self._pipeline.loss_in(self._sync.told())
        self._loss = loss if self._loss is None else self._loss + loss

    def _run(
        self, lists: Schedule, micro_batches: Sequence[MicroBatch], number: int, *, goes_on: bool, is_left: bool
    ) -> list[Any]:
        try:
            return self._pipeline.run(
                lists, micro_batches, backward=True, goes_on=goes_on, is_left=is_left, first=number
            )
        finally:
            self._recorder.extend()
