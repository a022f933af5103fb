"""Step: one optimizer step of one rank, as a list.

Two parts, because a loop of one's own, or a trainer's, does as it likes between them:

    `Step.run`        1 micro-batches   2 checks   3 schedule   4 weights   5 gradients begin
                      6 forwards and backwards, sums under them   7 sums end   8 loss
    `Step.optimize`   9 mean loss   10 norm   11 clip   12 update   13 gathers, up to the next forward

The components behind it: `Pipeline` runs the actions, `GradientSync` has the gradients, `Supervisor` the failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fold3d.comms.groups import Groups
from fold3d.data_parallel import gradients
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.data_parallel.late.each_micro_batch import EachMicroBatch
from fold3d.data_parallel.optimizer.hooks import OptimizerHooks, refuse_steps
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
from fold3d.stage.micro_batch import DropoutKey, Inputs, LossFunction, MicroBatch, loss_run
from fold3d.stage.part_hooks import PartHooks
from fold3d.stage.rank_model import RankModel
from fold3d.tensor_parallel.overlap_trial import OverlapTrial

logger = logging.getLogger(__name__)

_SMALLER = "a smaller batch (per_device_eval_batch_size in TrainingArguments): an evaluation keeps nothing but results"
"""What helps an evaluation."""


@dataclass(kw_only=True, eq=False)
class Step:
    """Steps of one rank; all ranks of the job make the same calls. Raises RankError on all of them when one fails."""

    cut: RankModel
    groups: Groups
    seed: int
    """Of dropout masks."""
    pipeline: Pipeline
    sync: GradientSync
    recorder: StepRecorder
    replanner: Replanner
    overlap: OverlapTrial
    supervisor: Supervisor
    memory: MemoryWatch
    division: Division | None = None
    """Makes parts of the micro-batches; None: they stay as they are given."""
    flow: Flow | MicroBatchFlow | None = None
    """Runs steps without a flush; None: each ends with one."""
    hooks: OptimizerHooks | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        cut, self._topology = self.cut, self.groups.topology
        self._part_hooks = PartHooks(cut.parameters, cut.placement.readers, cut.replaced(), cut.divided())
        self._name = "step 0"
        in_one = self._topology.world == 1 and len(cut.ranges) == 1
        self._parameters = () if in_one else tuple(cut.parameters.values())

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
        together = self.supervisor.together(self._name)
        with together, self.memory.explains(), rng_untouched(self.groups.device):
            # 1. Micro-batches, with the loss they go into and the seed of their dropout masks. Number i of replica d is
            #    number i * dp + d of the global batch, as a stock data loader deals them out.
            dp, replica, division = self._topology.dp, self._topology.dp_rank, self.division
            micro_batches = [
                MicroBatch(one, loss_run(loss_fn, self.cut.model, one), (self.seed, number, i * dp + replica))
                for i, one in enumerate(inputs)
            ]
            # 2. What must hold before work starts, and what the steps before have shown: from time to time another
            #    schedule is better.
            self.cut.check_weights()
            if self.flow is None:
                replan(len(inputs) if division is None else division.count(inputs))
            warning = self.memory.warning()
            if warning is not None:
                logger.warning("%s: %s", self._topology.describe(self._topology.rank), warning)
            if self.hooks is not None:
                self.hooks.put_innermost()
            self.recorder.begin(trains=True)
            self._part_hooks.look()
            # 3. The schedule, of the micro-batches or of parts of them.
            if division is not None:
                micro_batches = division.parts(micro_batches, loss_fn, self.sync.flush)
            if begun is not None:
                micro_batches[0] = _going_on(
                    micro_batches[0], begun, micro_batches[0].key == (self.seed, number, replica)
                )
            schedule = schedule_of(len(micro_batches))
            # 4. All weights, where the loss function may read memory of theirs that nobody sees read.
            if reads_weights:
                self.sync.flush()
            if self.flow is not None and self.flow.takes(len(micro_batches)):
                if reads_gradients:
                    raise ConfigError("flush=False never has gradients in .grad; pass reads_gradients=False")
                with (
                    self.overlap.step(),
                    refuse_steps(self._parameters),
                ):  # 5. to 8. of this step, and what is left of the one before
                    return self.flow.run(micro_batches)
            self.drain()
            # 5. Gradients begin at zero; a bucket is given to the rings once all its gradients are there.
            chunks = schedule.reduce_order(self._topology.pp_rank)
            self.sync.begin(len(micro_batches), chunks, whole=reads_gradients)
            # 6. Forwards and backwards, in the order of the schedule; gradients are summed under them.
            try:
                with self.overlap.step(), refuse_steps(self._parameters):
                    losses = self.pipeline.run(schedule, micro_batches, backward=True)
            finally:
                self.recorder.extend()
            # 7. All gradients are on their way to their sums, or there.
            self.sync.end()
            # 8. The loss, from the last stage to all.
            loss = self.pipeline.sum_of_losses(losses, micro_batches)
            return loss if self.flow is None else loss + self.flow.take_loss()

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
        together = self.supervisor.together(f"the optimizer of {self._name}", meets=False)
        with together, self.memory.explains():
            optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.update()
        return loss, norm

    def evaluate(
        self, schedule: Schedule, inputs: Inputs, function: LossFunction, begun: LossRun | None, key: DropoutKey
    ) -> Any:
        """Runs one batch forward; returns the last chunk's result on every rank of the replica.

        Args:
            key: of its random numbers.
        """
        together = self.supervisor.together("an evaluation")
        with together, self.memory.explains([_SMALLER]), rng_untouched(self.groups.device):
            self.drain()
            self.recorder.begin(trains=False)
            self.sync.flush()
            batch = MicroBatch(inputs, begun or loss_run(function, self.cut.model, inputs), key, trains=False)
            try:
                (result,) = self.pipeline.run(schedule, [batch], backward=False)
            finally:
                self.recorder.extend()
            return self.pipeline.result_everywhere(result, batch)

    # The lines that a loop of one's own writes itself

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """`optimizer` steps with the gradients of `run` from now on; `parts` as in `GradientSync.attach`."""
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None
        self.sync.attach(optimizer, parts=parts)
        if self.sync.steps_by_itself:
            self.hooks = OptimizerHooks(
                optimizer, self.sync, flush=self.flush, before=self._update, after=self._updated
            )

    def mean_loss(self, value: Tensor) -> Tensor:
        """Returns the mean of `value`, scalar, over the replicas."""
        with self.supervisor.together("the mean loss over the replicas"):
            return self.groups.mean_over_replicas(value)

    def grad_norm(self) -> Tensor:
        """Returns the exact global gradient norm, the same on every rank."""
        with self.supervisor.together(f"the gradient norm of {self._name}"):
            return self.sync.norm()

    def scale(self, coefficient: gradients.Factor) -> None:
        """Multiplies the step's gradients."""
        self.sync.scale(coefficient)

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be taken."""
        with self.supervisor.together(f"dropping the infinite gradients of {self._name}"):
            self.sync.abandon()

    def finish_updates(self, max_grad_norm: float | None) -> Tensor | None:
        """Takes the late gradients, clipped; returns their norm, None where there are none."""
        sync = self.sync
        if isinstance(sync, EachMicroBatch):  # a drain takes them all
            with self.supervisor.together("the last updates"), self.memory.explains():
                self.drain()
            return None
        if not isinstance(sync, DpSync) or sync.late is None or sync.late.settings is None:
            return None
        with self.supervisor.together("the last update"), self.memory.explains():
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
        if self.flow is not None:
            self.flow.drain()

    def flush(self) -> None:
        """Brings this rank's parameters up to date; meets nobody."""
        together = self.supervisor.together(f"waiting for the weights of {self._name}")
        with together, self.memory.explains():
            self.sync.flush()

    def replan(self, strategy: Strategy, schedule: Schedule) -> Strategy | None:
        """Looks at the step before the one that begins, on a device at the one before that; every so often plans anew.

        Returns: a better strategy, to be used from now on; its order of gathers is in use already.
        """
        for step in self.recorder.take_steps():
            # Steps in which ways of hiding TP.sync are tried in turns are no sample of those to come.
            if self.overlap.is_decided:
                self.replanner.observe(step.records, step.step_ms, step.exposed_tp_ms)
        if not self.replanner.is_due:
            return None
        sync = self.sync if isinstance(self.sync, DpSync) and self._topology.dp > 1 else None
        with self.supervisor.progress.during("planning from measured times", meets=True):
            divides = self.division is not None and self.division.may_divide
            better = self.replanner.look(strategy, schedule, sync, divides=divides)
        if self.division is not None and better is not None and self.replanner.size is not None and divides:
            self.division.resize(self.replanner.size)
        if better is not None:
            self.recorder.forget_steps()
        if better is not None and better.gather_order and sync is not None:
            sync.reschedule(better.gather_order[self._topology.pp_rank])
        return better

    def breakdown_later(self) -> Callable[[], StepBreakdown]:
        """Returns what makes the breakdown of where the time of the last step went, at any later time."""
        return self.recorder.breakdown_later(self.replanner.believed)

    def _update(self) -> None:
        """The optimizer steps."""
        self.supervisor.progress.life.check()
        together = self.supervisor.together(f"the optimizer of {self._name}", meets=False)
        with together, self.memory.explains():
            self.sync.update()
        self.recorder.extend()

    def _updated(self) -> None:
        """The optimizer's own step is over; hooks of the user's that come now find gradients and weights."""
        self.sync.updated()
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
