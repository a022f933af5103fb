"""Step: one optimizer step of one rank, as a list.

Two parts, because a loop of one's own, or a trainer's, does as it likes between them:

    `Step.run`        1 micro-batches   2 checks   3 schedule   4 weights   5 gradients begin
                      6 forwards and backwards, sums under them   7 sums end   8 loss
    `Step.optimize`   9 mean loss   10 norm   11 clip   12 update   13 gathers, up to the next forward

The rooms behind it: `Pipeline` runs the actions, `GradientSync` has the gradients, `Supervisor` the failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.data_parallel import gradients
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.data_parallel.late.each_micro_batch import EachMicroBatch
from fold3d.data_parallel.optimizer.hooks import OptimizerHooks
from fold3d.device import rng_untouched
from fold3d.engine.division import Division
from fold3d.engine.flow import Flow, MicroBatchFlow
from fold3d.engine.loss_scaler import LossScaler
from fold3d.engine.pipeline import Pipeline
from fold3d.engine.planning.replanner import Replanner
from fold3d.engine.step_recorder import StepRecorder
from fold3d.errors import ConfigError
from fold3d.faults.supervisor import Supervisor
from fold3d.observe.memory import MemoryWatch
from fold3d.observe.step_breakdown import StepBreakdown
from fold3d.plan.strategy import Strategy
from fold3d.schedule import Schedule
from fold3d.stage.loss_run import LossRun
from fold3d.stage.micro_batch import Inputs, LossFunction, MicroBatch, loss_run
from fold3d.stage.part_hooks import PartHooks
from fold3d.stage.rank_model import RankModel
from fold3d.tensor_parallel.overlap_trial import OverlapTrial
from fold3d.topology import Topology

logger = logging.getLogger(__name__)

_SMALLER = "a smaller batch (per_device_eval_batch_size in TrainingArguments): an evaluation keeps nothing but results"
"""What helps an evaluation."""


class Step:
    """Steps of one rank; all ranks of the job make the same calls. Raises RankError on all of them when one fails."""

    def __init__(
        self,
        cut: RankModel,
        topology: Topology,
        seed: int,
        device: torch.device,
        *,
        pipeline: Pipeline,
        sync: GradientSync,
        recorder: StepRecorder,
        replanner: Replanner,
        overlap: OverlapTrial,
        supervisor: Supervisor,
        mean_over_replicas: Callable[[Tensor], Tensor],
        memory: MemoryWatch,
        changes: Callable[[], Sequence[str]],
        division: Division | None = None,
        flow: Flow | MicroBatchFlow | None = None,
    ) -> None:
        """Args:
        seed: of dropout masks.
        changes: settings with which less memory is needed; asked when little is left of it.
        mean_over_replicas: of a tensor, the same on all of them; all replicas of the stage call.
        division: makes parts of the micro-batches; None: they stay as they are given.
        flow: runs steps without a flush; None: each ends with one.
        """
        self._flow = flow
        self._topology, self._seed, self._device = topology, seed, device
        self._pipeline, self._sync, self._recorder, self._replanner = pipeline, sync, recorder, replanner
        self._supervisor, self._mean_over_replicas, self._overlap = supervisor, mean_over_replicas, overlap
        self._part_hooks = PartHooks(cut.parameters, cut.placement.readers, cut.replaced(), cut.divided())
        self._model = cut.model
        self._memory, self._changes, self._division = memory, changes, division
        self._name = "step 0"
        self.hooks: OptimizerHooks | None = None

    def run(
        self,
        number: int,
        replan: Callable[[int], None],
        schedule_of: Callable[[int], Schedule],
        inputs: Sequence[Inputs],
        loss_fn: LossFunction,
        begun: LossRun | None = None,
        *,
        reads_weights: bool,
        reads_gradients: bool,
    ) -> Tensor:
        """Runs the forwards, backwards and gradient sums of step `number`; see `Engine.run`.

        Args:
            replan: number of micro-batches -> makes `schedule_of` return what is better, if anything is.
            schedule_of: number of micro-batches -> what all ranks run.
            begun: the run of `loss_fn` with the first micro-batch, or its first part, if it has begun.
        Returns: the replica's loss, scalar, on each of its ranks.
        """
        self._name = f"step {number + 1}"
        together = self._supervisor.together(self._name)
        with together, self._memory.explains(self._changes), rng_untouched(self._device):
            # 1. Micro-batches, with the loss they go into and the seed of their dropout masks. Number i of replica d is
            #    number i * dp + d of the global batch, as a stock data loader deals them out.
            dp, replica, division = self._topology.dp, self._topology.dp_rank, self._division
            micro_batches = [
                MicroBatch(one, loss_run(loss_fn, self._model, one), (self._seed, number, i * dp + replica))
                for i, one in enumerate(inputs)
            ]
            # 2. What must hold before work starts, and what the steps before have shown: from time to time another
            #    schedule is better.
            if self._flow is None:
                replan(len(inputs) if division is None else division.count(inputs))
            warning = self._memory.warning(self._changes)
            if warning is not None:
                logger.warning("%s: %s", self._topology.describe(self._topology.rank), warning)
            if self.hooks is not None:
                self.hooks.put_innermost()
            self._recorder.begin(trains=True)
            self._part_hooks.look()
            # 3. The schedule, of the micro-batches or of parts of them.
            if division is not None:
                micro_batches = division.parts(micro_batches, loss_fn, self._sync.flush)
            if begun is not None:
                micro_batches[0] = _going_on(
                    micro_batches[0], begun, micro_batches[0].key == (self._seed, number, replica)
                )
            schedule = schedule_of(len(micro_batches))
            # 4. Weights that the loss function may read; other layers wait for their own when they run.
            if reads_weights:
                self._sync.flush()
            if self._flow is not None and self._flow.takes(len(micro_batches)):
                if reads_gradients:
                    raise ConfigError("flush=False never has gradients in .grad; pass reads_gradients=False")
                with self._overlap.step():  # 5. to 8. of this step, and what is left of the one before
                    return self._flow.run(micro_batches)
            self.drain()
            # 5. Gradients begin at zero; a bucket is given to the rings once all its gradients are there.
            chunks = schedule.reduce_order(self._topology.pp_rank)
            self._sync.begin(len(micro_batches), chunks, whole=reads_gradients)
            # 6. Forwards and backwards, in the order of the schedule; sums travel under them.
            try:
                with self._overlap.step():
                    losses = self._pipeline.run(schedule, micro_batches, backward=True)
            finally:
                self._recorder.extend()
            # 7. All gradients are on their way to their sums, or there.
            self._sync.end()
            # 8. The loss, from the last stage to all.
            loss = self._pipeline.sum_of_losses(losses, micro_batches)
            return loss if self._flow is None else loss + self._flow.take_loss()

    def optimize(
        self, replica_loss: Tensor, optimizer: Optimizer, max_grad_norm: float | None, scaler: LossScaler | None
    ) -> tuple[Tensor, Tensor]:
        """Steps the optimizer with the gradients of `run`.

        Args:
            replica_loss: what `run` returned.
            scaler: by whose scale the gradients are larger.
        Returns: the global loss and the global gradient norm, scalars; the norm is on the device, where it stays.
        """
        # 9. The loss of the global batch, while the last gradients are still being summed.
        loss = self.mean_loss(replica_loss)
        # 10. The exact global norm: one exchange, which waits for the sums.
        norm = None if scaler is None else scaler.unscaled_norm()
        norm = self.grad_norm() if norm is None else norm
        # 11. Clipping.
        if max_grad_norm is not None:
            self.scale(gradients.clip_coefficient(norm, max_grad_norm))
        # 12. The update, by hooks inside of all that the user has there: shards now, other layers before their next
        #     forward. 13. Gathers of what was updated begin, and are waited for there.
        together = self._supervisor.together(f"the optimizer of {self._name}", meets=False)
        with together, self._memory.explains(self._changes):
            optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.update()
        return loss, norm

    def evaluate(self, schedule: Schedule, inputs: Inputs, function: LossFunction, begun: LossRun | None) -> Any:
        """Runs one batch forward; returns the last chunk's result on every rank of the replica."""
        with self._supervisor.together("an evaluation"), self._memory.explains(lambda: [_SMALLER]):
            self.drain()
            self._recorder.begin(trains=False)
            self._sync.flush()
            batch = MicroBatch(inputs, begun or loss_run(function, self._model, inputs), None)
            try:
                (result,) = self._pipeline.run(schedule, [batch], backward=False)
            finally:
                self._recorder.extend()
            return self._pipeline.result_everywhere(result, batch)

    # The lines that a loop of one's own writes itself

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """`optimizer` steps with the gradients of `run` from now on; `parts` as in `GradientSync.attach`."""
        self._sync.attach(optimizer, parts=parts)
        if self._sync.steps_by_itself:
            self.hooks = OptimizerHooks(
                optimizer, self._sync, flush=self.flush, before=self._update, after=self._updated
            )

    def mean_loss(self, value: Tensor) -> Tensor:
        """Returns the mean of `value`, scalar, over the replicas."""
        with self._supervisor.together("the mean loss over the replicas"):
            return self._mean_over_replicas(value)

    def grad_norm(self) -> Tensor:
        """Returns the exact global gradient norm, the same on every rank."""
        with self._supervisor.together(f"the gradient norm of {self._name}"):
            return self._sync.norm()

    def scale(self, coefficient: gradients.Factor) -> None:
        """Multiplies the step's gradients."""
        self._sync.scale(coefficient)

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be taken."""
        with self._supervisor.together(f"dropping the infinite gradients of {self._name}"):
            self._sync.abandon()

    def finish_updates(self, max_grad_norm: float | None) -> Tensor | None:
        """Takes the late gradients, clipped; returns their norm, None where there are none."""
        sync = self._sync
        if isinstance(sync, EachMicroBatch):  # a drain takes them all
            with self._supervisor.together("the last updates"), self._memory.explains(self._changes):
                self.drain()
            return None
        if not isinstance(sync, DpSync) or sync.late is None or sync.late.settings is None:
            return None
        with self._supervisor.together("the last update"), self._memory.explains(self._changes):
            self.drain()
            sync.flush()  # what the last update has left to do, with the gradients before these
            sync.begin(0, ())  # a step without micro-batches
            sync.end()
            norm = sync.norm()
            if max_grad_norm is not None:
                sync.scale(gradients.clip_coefficient(norm, max_grad_norm))
            sync.update(keeps=False)
            sync.updated()
            sync.flush()
        return norm

    def drain(self) -> None:
        """Ends what a step without a flush has left to the next one; all ranks call."""
        if self._flow is not None:
            self._flow.drain()

    def flush(self) -> None:
        """Brings this rank's parameters up to date; meets nobody."""
        together = self._supervisor.together(f"waiting for the weights of {self._name}")
        with together, self._memory.explains(self._changes):
            self._sync.flush()

    def replan(self, strategy: Strategy, schedule: Schedule) -> Strategy | None:
        """Looks at the step before the one that begins, on a device at the one before that; every so often plans anew.

        Returns: a better strategy, to be used from now on; its order of gathers is in use already.
        """
        for step in self._recorder.take_steps():
            # Steps in which ways of hiding TP.sync are tried in turns are no sample of those to come.
            if self._overlap.is_decided:
                self._replanner.observe(step.records, step.step_ms, step.exposed_tp_ms)
        if not self._replanner.is_due:
            return None
        sync = self._sync if isinstance(self._sync, DpSync) and self._topology.dp > 1 else None
        with self._supervisor.progress.during("planning from measured times", meets=True):
            better = self._replanner.look(strategy, schedule, sync)
        if better is not None:
            self._recorder.forget_steps()
        if better is not None and better.gather_order and sync is not None:
            sync.reschedule(better.gather_order[self._topology.pp_rank])
        return better

    def breakdown_later(self) -> Callable[[], StepBreakdown]:
        """Returns what makes the breakdown of where the time of the last step went, at any later time."""
        return self._recorder.breakdown_later(self._replanner.believed)

    def _update(self) -> None:
        """The optimizer steps."""
        self._supervisor.progress.life.check()
        together = self._supervisor.together(f"the optimizer of {self._name}", meets=False)
        with together, self._memory.explains(self._changes):
            self._sync.update()
        self._recorder.extend()

    def _updated(self) -> None:
        """The optimizer's own step is over; hooks of the user's that come now find gradients and weights."""
        self._sync.updated()
        if self.hooks is not None and self.hooks.others_after:
            self.flush()


def _going_on(first: MicroBatch, begun: LossRun, is_first: bool) -> MicroBatch:
    """Returns the micro-batch, or part of one, with the loss function that has begun, if it has begun with this one: a
    part without labels is left out."""
    if not is_first or (first.part is not None and first.part[0] > 0):
        begun.let_go()
        return first
    begun.weigh(first.loss.weight)
    return replace(first, loss=begun)
