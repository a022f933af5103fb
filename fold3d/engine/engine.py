"""Engine: trains any torch.nn.Module over dp x pp processes, one optimizer step at a time."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fold3d.comms.consistency import agree
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.optimizer.hooks import OptimizerHooks
from fold3d.data_parallel.optimizer.separable import check_separable
from fold3d.device import default_device, make_current, rng_untouched
from fold3d.engine import loss, planner, state
from fold3d.engine.arguments import check_arguments
from fold3d.engine.built import Built
from fold3d.engine.loss_scaler import LossScaler
from fold3d.engine.pipeline import Pipeline
from fold3d.errors import ConfigError
from fold3d.observe.step_breakdown import StepBreakdown
from fold3d.observe.step_output import StepOutput
from fold3d.placement.partition import split_ranges
from fold3d.plan.programs import Programs
from fold3d.plan.resolve import needs_planner, programs_of, resolve_auto, unplanned
from fold3d.plan.strategy import MIXED, Ranges, Strategy
from fold3d.stage.micro_batch import MicroBatch, split_batch
from fold3d.stage.model_chunk import ModelCall
from fold3d.stage.rank_model import RankModel, arguments_of, record
from fold3d.topology import Topology
from fold3d.trace.example import is_transformers_model

_numbers = itertools.count()  # of the engines of one process


class Engine(Built):
    """Trains `model` as one of dp * pp processes; every process makes the same calls in the same order.

    The model's own forward runs on every rank, restricted to the layers the rank holds; the model object is cut in
    place. A model with weights keeps them (replica 0's are used everywhere), each rank its share; a model built on the
    meta device gets its weights by (seed, parameter name), or from `weights`, and is never whole on any rank.

    Args:
        model: `forward(**micro_batch)` returns a loss: a tensor, or an object or dict with `loss`.
        config: how the model is spread.
        optimizer: makes the optimizer from a list of this rank's trainable parameters (never empty: a stage without
            any gets a parameter of no elements); element-wise optimizers (SGD, Adam, AdamW ...) give the
            single-process result. None: `run` and `evaluate` work, `step` does not.
        max_grad_norm: clips to this global norm in `step`; None: no clipping.
        scaler: scales losses so that fp16 gradients do not vanish; `step` leaves the parameters alone on every rank
            when the gradients of any rank are not finite. Its scale must be the same on all ranks. None: no scaling.
        example: a micro-batch to record the model with, by argument name. HuggingFace models need none; other
            models that are cut are recorded with the first batch when it is missing. A function that returns one (or
            None): the first batch records any model, the function is asked where the model is needed before.
        weights: folder with safetensors for a model on the meta device.
        autocast: the context that `loss_fn` or the model's forward itself puts around the layers, such as
            functools.partial(torch.autocast, "cpu", torch.bfloat16): the planner times layers in it.
        device: where parameters live; None: this process's CUDA device, or the CPU.
        optimizer_like: where the optimizer is attached later, makes one like it, for the planner to try; None: AdamW.

    Raises: ConfigError, TraceError before any process group is built; RankError from every method that runs the
        model, on every rank, when any rank fails.
    """

    def __init__(
        self,
        model: Module,
        config: ParallelConfig,
        *,
        optimizer: Callable[[list[Parameter]], Optimizer] | None = None,
        max_grad_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        example: Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None = None,
        weights: str | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        device: torch.device | None = None,
        optimizer_like: Callable[[list[Parameter]], Optimizer] | None = None,
    ):
        check_arguments(max_grad_norm, optimizer, autocast)
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.topology = Topology(dp=config.resolve_dp(world), pp=config.pp, rank=rank)
        self.config = config
        self._constraints = resolve_auto(config, self.topology.dp)
        if self._constraints.segments is not None:  # a bad schedule ends here
            programs_of(config, self._constraints, self.topology.dp).training(config.micro_batches)
        self._plans = needs_planner(config, self._constraints, self.topology.dp)
        self.device = make_current(device or default_device())
        self.optimizer: Optimizer | None = None
        self.step_index = 0
        self._make_optimizer = optimizer
        self._planned_optimizer = optimizer or optimizer_like
        self._autocast = autocast
        self._scaler = LossScaler(scaler) if scaler is not None and scaler.is_enabled() else None
        self.hooks: OptimizerHooks | None = None
        self._weights = weights
        self._strategy: Strategy | None = None
        self.planned_memory: int | None = None
        self._cut: RankModel | None = None
        self._pipeline: Pipeline | None = None
        self._world: WorldGroup | None = None
        self._fallback: Callable[[], Mapping[str, Any] | None] = lambda: None
        self.on_build: list[Callable[[], None]] = []
        self._failure: str | None = None
        self._closed = False
        # The planner times layers with a real micro-batch; the synthetic one of a transformers model will not do.
        at_once = is_transformers_model(model) and not self._plans
        if callable(example):
            self._fallback, at_once, example = example, False, None
        if example is not None or not self._records or at_once:
            self._build(example)

    # Construction

    @property
    def _records(self) -> bool:
        """Whether a recording is of use: to cut the model, or to know which layer waits for which parameters."""
        return self._plans or self.config.pp * (self._constraints.segments or 1) > 1 or self.topology.dp > 1

    def _build(self, example: Mapping[str, Any] | None, call: ModelCall | None = None) -> None:
        self._take_turn()
        error: Exception | None = None
        if self._records and example is not None and call is not None:
            try:
                example = arguments_of(self.model, self.config, example, call)
            except Exception as own:
                error = own
        digest, number = "", next(_numbers)
        recording = proposed = None
        if self._plans and error is None:
            recording, proposed = planner.resolve_auto(
                *(self.model, self.config, self._constraints, self.world, self.device, example),
                *(self._planned_optimizer, self._autocast, number),
            )
            if proposed is None:  # nothing can be cut
                self._constraints = replace(self._constraints, segments=1)
        strategy = None
        if proposed is not None:
            strategy, self.planned_memory = proposed[1].strategy, proposed[1].memory_bytes
        ranges: Ranges = ((0, 0),)
        try:
            if error is not None:
                raise error
            if recording is None and self._records:
                recording = record(self.model, self.config, example)
            if strategy is None and recording is not None:
                chunks = self.config.pp * (self._constraints.segments or 1)
                ranges = tuple(split_ranges(recording, chunks))
        except Exception as own:
            error = own
        if self.topology.dp > 1 and strategy is None:  # replicas have recorded micro-batches of different sizes
            agree(self.world, "", number, error)
            ranges = self.world.share(ranges, timeout=self.world.patience)
        try:
            if error is not None:
                raise error
            if strategy is None:
                strategy = unplanned(self.config, self._constraints, self.topology.dp, ranges)
            self._cut = RankModel(
                self.model, self.config, strategy, self.topology, self.device, recording, self._weights
            )
            self._follow(strategy)
            blocks = recording.blocks if recording else ()
            schedule = self.programs.compute(self.config.micro_batches).csv()
            digest = strategy.digest(repr(self.config), ",".join(blocks), schedule)
        except Exception as own:
            error = own
        name = f"{digest}/{agree(self.world, digest, number, error)}"
        cut = self._cut
        assert cut is not None and strategy is not None
        # What the user has fixed stays fixed, so a schedule of theirs is never exchanged.
        may_change = self._constraints.schedule is None and self._constraints.group_size is None
        self._pipeline = Pipeline(
            *(cut, self.config, strategy, self.world, self.device, name, proposed if may_change else None),
            read=self.flush,
        )
        weakref.finalize(self, cut.split.remove).atexit = False
        # Threads that outlive the interpreter abort the process: a script that never calls close() must end well.
        self._at_exit = weakref.finalize(self, self._pipeline.close)
        self._loss_takes_count = loss.takes_label_count(self.model)
        if self._make_optimizer is not None:
            # torch's optimizers refuse an empty list; a stage all of whose parameters are frozen gets one of no size.
            trainable = list(cut.trainable().values()) or [Parameter(torch.empty(0, device=self.device))]
            try:
                self.optimizer = self._make_optimizer(trainable)
                self._attach(self.optimizer)
            except BaseException:
                self.close()
                raise
        for settle in self.on_build:
            settle()

    def attach(self, optimizer: Optimizer) -> None:
        """Makes `optimizer.step()` part of DP.sync: it returns at once, each layer is updated before its next forward.

        For a training loop of one's own, which calls `run`, `grad_norm` or `clip_grad_norm`, `optimizer.step()` and
        reads weights after `flush`. Gradients are then not in `.grad` (see `run`). One given to the constructor is
        attached already. With one replica `optimizer.step()` stays as it is.

        Raises: ConfigError when dp_sync="zero1" and the optimizer does not work element by element.
        """
        self._built()
        if self.optimizer is not None:
            raise ConfigError("this engine has an optimizer already")
        self.optimizer = optimizer
        self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> None:
        assert self._pipeline is not None
        sync = self._pipeline.dp_sync
        if sync is not None:
            # What holds for all stages: all ranks raise, or none.
            sync.attach(optimizer, parts=self.strategy.dp_sync in ("zero1", MIXED))
            self.hooks = OptimizerHooks(optimizer, sync, flush=self.flush, before=self._update, after=self._updated)
        else:
            if self.topology.pp > 1:
                check_separable(optimizer, parts=False)  # each stage steps its own parameters
            optimizer.register_step_pre_hook(self._pipeline.share_tied_gradients)

    def _follow(self, strategy: Strategy) -> None:
        """The steps from now on are the strategy's."""
        before, self._strategy = self._strategy, strategy
        if before is None or (before.schedule, before.group_size) != (strategy.schedule, strategy.group_size):
            self.programs = Programs.of(strategy)

    # One's own loop, or a trainer's

    def run(
        self,
        micro_batches: list[MicroBatch],
        loss_fn: Callable[[Module, MicroBatch], torch.Tensor],
        *,
        reads_weights: bool = True,
        reads_gradients: bool = False,
    ) -> torch.Tensor:
        """Runs forward, backward and the gradient sums of one optimizer step; all ranks call.

        Afterwards `.grad` of this rank's parameters is the mean over the replicas. An attached optimizer takes them
        from elsewhere: reading `.grad` then raises ConfigError, unless `reads_gradients`. The global RNG is as before.

        Args:
            micro_batches: this replica's, the same on each of its stages.
            loss_fn: (model, micro_batch) -> this micro-batch's share of the replica's loss, scalar. Shares of a replica
                add up to its loss; the global loss is the mean over the replicas. Runs on every chunk; on all but the
                last one the model call inside does not return.
            reads_weights: whether `loss_fn` may read weights otherwise than by calling the model; False lets layers be
                updated one by one while others compute.
            reads_gradients: whether `.grad` is read or changed before `optimizer.step()`, which steps what it finds;
                all ranks say the same, and all replicas make the same of them.
        Returns: the replica's loss, scalar, on each of its ranks.
        """
        if not micro_batches:
            raise ValueError("run needs at least one micro-batch")
        cut, pipeline = self._built(micro_batches[0], loss_fn)
        self._take_turn()
        key_step = self.step_index
        self.step_index += 1
        # Micro-batch i of replica d is number i * dp + d of the global batch, as a stock data loader deals them out.
        keys = [
            (self.config.seed, key_step, i * self.topology.dp + self.topology.dp_rank)
            for i in range(len(micro_batches))
        ]
        if pipeline.dp_sync is None:
            for parameter in cut.parameters.values():
                parameter.grad = None
        with self._failing_together(self._step_name()), rng_untouched(self.device):
            better = pipeline.tune(self.strategy, self.programs.training(len(micro_batches)))
            if better is not None:
                self._follow(better)
            program = self.programs.training(len(micro_batches))
            if self.hooks is not None:
                self.hooks.put_innermost()
            return pipeline.train(
                program, micro_batches, loss_fn, keys, reads_weights=reads_weights, reads_gradients=reads_gradients
            )

    def grad_norm(self) -> torch.Tensor:
        """Returns the exact global gradient norm, the same on every rank; all ranks of the job call."""
        cut, pipeline = self._built()
        with self._failing_together(f"the gradient norm of {self._step_name()}", meets=True):
            if pipeline.dp_sync is not None:
                return pipeline.dp_sync.norm()
            names = cut.primary()
            # In the model's order: a set's differs between processes, and so would the last bit of the sum.
            primary = [parameter for name, parameter in cut.parameters.items() if name in names]
            return gradients.global_norm(primary, gradients.norm_dtype(cut.model), self.world.pipeline)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients to a global norm of at most `max_norm`; returns the norm before; all ranks call.

        With an optimizer attached they are scaled when it steps.
        """
        norm = self.grad_norm()
        self._scale_gradients(gradients.clip_coefficient(norm, max_norm))
        return norm

    def _scale_gradients(self, coefficient: float) -> None:
        cut, pipeline = self._built()
        if pipeline.dp_sync is not None:
            pipeline.dp_sync.scale(coefficient)
        else:
            gradients.scale(cut.parameters.values(), coefficient)

    def _update(self) -> None:
        """The optimizer steps."""
        _, pipeline = self._built()
        assert pipeline.dp_sync is not None
        with self._failing_together(f"the optimizer of {self._step_name()}", meets=False):
            pipeline.dp_sync.update()
        pipeline.extend()

    def _updated(self) -> None:
        """The optimizer's own step is over; hooks of the user's that come now find gradients and weights."""
        assert self._pipeline is not None and self._pipeline.dp_sync is not None and self.hooks is not None
        self._pipeline.dp_sync.updated()
        if self.hooks.others_after:
            self.flush()

    def flush(self) -> None:
        """Brings this rank's parameters up to date, which `optimizer.step()` may have left to the next forward."""
        if self._pipeline is None and self._failure is None:  # as the user made them, or final
            return
        _, pipeline = self._built()
        if pipeline.dp_sync is not None:
            with self._failing_together(f"waiting for the weights of {self._step_name()}"):
                pipeline.dp_sync.flush()

    def forward(self, batch: MicroBatch, fn: Callable[[Module, MicroBatch], Any]) -> Any:
        """Returns fn(model, batch) without gradients, the last chunk's result on every rank of the replica.

        Args:
            batch: any batch size, the same on each stage of the replica.
            fn: runs on every chunk; on all but the last one the model call inside does not return. Its result may be
                any nesting of tensors and plain Python values.
        """
        self._take_turn()
        _, pipeline = self._built(batch, fn)
        with self._failing_together("an evaluation"):
            return pipeline.evaluate(self.programs.evaluation(), batch, fn)

    # The whole step

    def step(self, batch: MicroBatch) -> StepOutput:
        """Runs one optimizer step on this replica's batch; all ranks call.

        With several replicas, layers are updated when their next forward begins: parameters read directly afterwards
        (`model.parameters()`, an average of weights) are complete after `flush`.

        Args:
            batch: tensors by argument name; dimension 0 is divided into config.micro_batches micro-batches.
                Other values go to every micro-batch unchanged.
        """
        micro_batches = split_batch(batch, self.config.micro_batches)
        _, pipeline = self._built(micro_batches[0], loss.first_call(self.model))
        if self.optimizer is None:
            raise ConfigError("step needs an optimizer: pass optimizer=functools.partial(torch.optim.AdamW, lr=...)")
        share, scaler = self._share_of_loss(micro_batches), self._scaler
        if scaler is not None:
            share = scaler.scaled(share)
        replica_loss = self.run(micro_batches, share, reads_weights=False)
        mean = self._mean_over_replicas(replica_loss)  # while the last gradients are still being summed
        norm = self.grad_norm()
        if scaler is not None:
            mean, norm = mean * scaler.inverse, norm * scaler.inverse
        factor = 1.0 if self.max_grad_norm is None else gradients.clip_coefficient(norm, self.max_grad_norm)
        if scaler is None or scaler.is_finite(norm):
            self._scale_gradients(factor * (1.0 if scaler is None else scaler.inverse))
            with self._failing_together(f"the optimizer of {self._step_name()}", meets=False):
                self.optimizer.step()
        elif pipeline.dp_sync is not None:
            with self._failing_together(f"dropping the infinite gradients of {self._step_name()}"):
                pipeline.dp_sync.abandon()
        self.optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.update(norm)
        return StepOutput(loss=mean, grad_norm=norm, make_breakdown=pipeline.breakdown_later())

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """Returns the global batch's loss without gradients, in evaluation mode; any batch size; all ranks call."""
        self._built(batch, loss.first_call(self.model))
        was_training = self.model.training
        self.model.eval()
        try:
            return self._mean_over_replicas(self.forward(batch, self._share_of_loss([batch])))
        finally:
            self.model.train(was_training)

    def breakdown(self) -> StepBreakdown:
        """Returns where this rank's time went in the last `run`."""
        return self._built()[1].breakdown_later()()

    account = breakdown
    """Its former name."""

    def highest_of_replica(self, value: float) -> float:
        """Returns the highest `value` that a stage of this replica gives; all ranks call."""
        highest = torch.tensor(value, dtype=torch.float64)
        self._built()
        with self._failing_together("comparing the stages"):
            self.world.pipeline.all_reduce(highest, torch.maximum)
        return float(highest)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole model's weights, optimizer state and step counter, by original names; all ranks call.

        The same on every rank, on the CPU, independent of dp, pp and segments.
        """
        self.meet("engine.state_dict()")
        cut, pipeline = self._built()
        with self._failing_together("gathering the state"), self.whole_optimizer_state():
            return {
                "model": state.gather_model(cut, pipeline.groups.pipeline, pipeline.groups.data),
                "optimizer": state.gather_optimizer(cut, self.optimizer, pipeline.groups.pipeline),
                "step_index": self.step_index,
            }

    @contextlib.contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """Weights are up to date and the optimizer's state is whole on this rank in the body; all ranks run it."""
        sync = self._built()[1].dp_sync
        if sync is None:
            yield
            return
        sync.collect_state()
        try:
            yield
        finally:
            sync.release_state()

    def load_state_dict(self, full: Mapping[str, Any]) -> None:
        """Takes this rank's share of what `state_dict` returned, under any layout.

        Raises: CheckpointError when names or shapes do not match; nothing has changed then.
        """
        cut, pipeline = self._built()
        self.flush()
        state.load(cut, self.optimizer, full)
        if pipeline.dp_sync is not None:
            pipeline.dp_sync.split_state()
        self.step_index = int(full["step_index"])

    def close(self) -> None:
        """Ends communication and gives the model its own forward back. Weights of other ranks stay on meta.

        The engine cannot be used again, nor can the model by another one that needs those weights.
        """
        self._closed = True
        if self._pipeline is not None:
            self._at_exit.detach()
            self._pipeline.close()
            self._pipeline = None
        if self._world is not None:
            self._world.close()
        if self._cut is not None:
            self._cut.split.remove()
            self._cut = None

    # Inside

    def _share_of_loss(self, micro_batches: list[MicroBatch]) -> loss.LossFunction:
        count = loss.count_labels(self.model, micro_batches) if self._loss_takes_count else None
        if count is None:
            return loss.mean_share(len(micro_batches))
        total = torch.tensor(count)
        with self._failing_together("counting the labels of the global batch"):
            self.groups.data.all_reduce(total)
        return loss.token_share(total, self.topology.dp, len(micro_batches))

    def _mean_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        mean = value.detach().clone()
        with self._failing_together("the mean loss over the replicas"):
            self.groups.data.all_reduce(mean)
        return mean / self.topology.dp

    def _step_name(self) -> str:
        return f"step {self.step_index}"
