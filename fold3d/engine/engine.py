"""Engine: trains any torch.nn.Module over dp x tp x pp processes, one optimizer step at a time."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fold3d import schedule as schedules
from fold3d.comms.consistency import all_or_none
from fold3d.comms.groups import Groups
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.optimizer.hooks import OptimizerHooks
from fold3d.data_parallel.optimizer.parameter_state import cut_state
from fold3d.device import all_rng_untouched, default_device, make_current
from fold3d.engine import loss, state
from fold3d.engine.arguments import check_arguments, check_batches, check_compiled, check_model
from fold3d.engine.builder import connect
from fold3d.engine.built import BuiltRank
from fold3d.engine.loss_scaler import LossScaler
from fold3d.engine.meeting import meet
from fold3d.engine.planning.cut_model import BuildRequest, CutModel, First, cut_model
from fold3d.engine.planning.mesh import Asked, decide_mesh
from fold3d.errors import ConfigError
from fold3d.faults.job import supervisor_of_engine
from fold3d.observe.memory import MemoryWatch
from fold3d.observe.step_breakdown import StepBreakdown
from fold3d.observe.step_output import StepOutput
from fold3d.plan.programs import Programs
from fold3d.plan.resolve import followed, programs_of, resolve_auto
from fold3d.plan.strategy import MIXED, Strategy
from fold3d.stage.loss_run import LossRun
from fold3d.stage.micro_batch import DropoutKey, Inputs, LossFunction, split_batch
from fold3d.topology import Topology
from fold3d.trace import Trace
from fold3d.trace.batches import is_transformers_model, samples_of, synthetic_example
from fold3d.weights.empty import folder_of
from fold3d.weights.part_marks import calls_allowed
from fold3d.weights.parts import Parts

_engines: WeakKeyDictionary[Module, weakref.ref[Engine]] = WeakKeyDictionary()
"""Of each model the one that has cut it, or is about to."""


class Engine(state.WholeState):
    """Trains `model` as one of dp * tp * pp processes; every process makes the same calls in the same order.

    The model's own forward runs on every rank, restricted to the layers the rank holds; the model object is cut in
    place. A model with weights keeps them (replica 0's are used everywhere), each rank its share; a model built on the
    meta device gets its weights by (seed, parameter name), or from `weights`, and is never whole on any rank.

    Args:
        model: `forward(**micro_batch)` returns a loss: a tensor, or an object or dict with `loss`.
        config: how the model is spread. With parallel="auto" the mesh is decided here, by `example`, which has as many
            samples as a micro-batch may have; `engine.config` and `engine.topology` say what it is.
        optimizer: makes the optimizer from a list of this rank's trainable parameters (never empty: a stage without
            any gets a parameter of no elements); element-wise optimizers (SGD, Adam, AdamW ...) give the
            single-process result. None: `run` and `evaluate` work, `step` does not.
        max_grad_norm: clips to this global norm in `step`; None: no clipping.
        scaler: scales gradients so that in fp16 they do not vanish; `step`, and in a loop of one's own
            `scaler.step(optimizer)` and `scaler.update()`, leave the parameters alone on every rank when the gradients
            of any rank are not finite. Its scale must be the same on all ranks. None: no scaling.
        example: a micro-batch to record the model with, by argument name; a function that returns one, or None, is
            asked where the model is needed before the first batch. None: the first batch records it; where it is needed
            before, an example is made up for a HuggingFace model.
        weights: folder with safetensors for a model on the meta device; None: the one that `empty_weights` has noted.
        autocast: the context that `loss_fn` or the model's forward itself puts around the layers, such as
            functools.partial(torch.autocast, "cpu", torch.bfloat16): the planner times layers in it.
        device: where parameters live; None: this process's accelerator, or the CPU.
        optimizer_like: where the optimizer is attached later, makes one like it, for the planner to try; None: AdamW.
        compile_options: what torch.compile is given for each block, such as {"mode": "max-autotune"}, not with tp;
            None: blocks are not compiled.
        trained_later: returns names of parameters that may be trained although they are frozen when the model is cut,
            such as an adapter that is not switched on; asked then. With several replicas others cannot be, later.

    A model has one engine: one that cuts a model which another has cut closes that.

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
        compile_options: Mapping[str, Any] | None = None,
        trained_later: Callable[[], Collection[str]] = tuple,
    ):
        config = followed(config)
        check_arguments(config, max_grad_norm, optimizer, autocast, scaler)
        if config.is_open:
            made = (example() if callable(example) else example) or _made_up(model)
            asked = Asked(
                model=model,
                config=config,
                example=made,
                samples=samples_of(made) or 1,
                device=make_current(device or default_device()),
                optimizer=optimizer or optimizer_like,
                autocast=autocast,
                compile_options=compile_options,
            )
            config = decide_mesh(asked).config(config)
        weights = folder_of(model) if weights is None else weights
        check_compiled(config.tp, compile_options)
        check_model(model, config, weights)
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.config = config
        constraints = resolve_auto(config, config.resolve_dp(world))
        self.topology = Topology(
            dp=config.resolve_dp(world),
            pp=config.pp,
            tp=config.tp,
            rank=rank,
            style=schedules.style_of(config.schedule),
            segments=constraints.segments,
        )
        if constraints.segments is not None and config.micro_batch_size is None:  # a bad schedule ends here
            programs_of(config, constraints, self.topology.dp).training(config.micro_batches)
        self.device = make_current(device or default_device())
        if not config.flush and self.device.type != "cpu":
            raise ConfigError(f"flush=False is not available on {self.device.type}; set flush=True")
        self.optimizer: Optimizer | None = None
        self.step_index = 0
        self.setup_seconds = 0.0
        """For how long the model was recorded, measured, planned for and cut so far."""
        self.planned_memory: int | None = None
        """Bytes that the planner expects the fullest rank to need; None where it was not asked."""
        self.on_build: list[Callable[[], None]] = []
        """Called once the model has been cut, with no arguments."""
        self._make_optimizer = optimizer
        self._scaler = LossScaler.adopt(scaler) if scaler is not None and scaler.is_enabled() else None
        self._order = BuildRequest(
            model=model,
            config=config,
            constraints=constraints,
            topology=self.topology,
            device=self.device,
            optimizer=optimizer or optimizer_like,
            autocast=autocast,
            weights=weights,
            max_grad_norm=max_grad_norm,
            compile_options=compile_options,
            trained_later=trained_later,
        )
        self._supervisor = supervisor_of_engine(self.topology, config.silence_seconds)
        self._world: WorldGroup | None = None
        self._rank: BuiltRank | None = None
        self._cut: CutModel | None = None
        self._strategy: Strategy | None = None
        # The planner times layers with a real micro-batch, and into how many parts one is divided nobody can make up.
        self._makes_up = is_transformers_model(model) and not self._order.plans and config.micro_batch_size is None
        self._fallback: Callable[[], Mapping[str, Any] | None] = lambda: None
        if callable(example):
            self._fallback, self._makes_up, example = example, False, None
        if example is not None or (not self._order.records and config.micro_batch_size is None):
            self._build(example)

    # Construction

    def _build(self, example: Mapping[str, Any] | None, first: First | None = None) -> LossRun | None:
        """Returns the run of the first micro-batch's loss function, if it has begun."""
        self._take_model()
        begin = time.perf_counter()
        with self._supervisor.supervise("building the engine", meets=True), calls_allowed(self.model):  # even of parts
            cut = cut_model(self._order, self.world, example, first)
            self._cut = replace(cut, begun=None)
            weakref.finalize(self, cut.cut.coat.close).atexit = False
            try:
                self._connect(cut)
            except BaseException:
                cut.cut.coat.close()
                raise
        self.planned_memory = None if cut.planned is None else cut.planned[1].memory_bytes
        self._follow(cut.strategy)
        if self._make_optimizer is not None:
            # torch's optimizers refuse an empty list; a stage all of whose parameters are frozen gets one of no size.
            trainable = list(cut.cut.trainable().values()) or [Parameter(torch.empty(0, device=self.device))]
            try:
                self.attach(self._make_optimizer(trainable))
            except BaseException:
                self.close()
                raise
        for settle in self.on_build:
            settle()
        self.setup_seconds += time.perf_counter() - begin
        return cut.begun

    def _take_model(self) -> None:
        """The model is this engine's: one that had it before is closed, with weights that are final."""
        found = _engines.get(self.model)
        before = None if found is None else found()
        if before is not None and before is not self and before.is_built:
            if before._supervisor.progress.life.failure is None:
                before.drain()
            before.close()
        _engines[self.model] = weakref.ref(self)

    def _connect(self, cut: CutModel) -> BuiltRank:
        self._rank = rank = connect(cut, self._supervisor, self.world, self.device)
        # Threads that outlive the interpreter abort the process: a script that never calls close() must end well.
        self._at_exit = weakref.finalize(self, rank.close)
        if self._scaler is not None:
            self._scaler.follow(rank.step, {id(one) for one in rank.cut.parameters.values()}, self.device)
        return rank

    def recover(self) -> None:
        """Connects the ranks anew after a failure that was raised on all of them; all ranks call.

        Weights are as they were when it failed: those of before the step only if no optimizer had stepped yet. With
        several ranks the optimizer is no longer attached, and what it had of a state is as the failure left it.

        Raises: DistNetworkError when a rank does not come.
        """
        if self.topology.world == 1:  # nothing is broken where nobody communicates
            return
        self.optimizer = None
        rank, self._rank = self._rank, None
        if rank is not None:
            self._at_exit.detach()
            rank.close()
            if rank.step.hooks is not None:
                rank.step.hooks.remove()
        if self._world is not None:
            self._world.close()
        self._supervisor, self._world = supervisor_of_engine(self.topology, self.config.silence_seconds), None
        if rank is not None:
            assert self._cut is not None
            self._cut = replace(self._cut, name=f"{self._cut.name}+")
            self._connect(self._cut)

    def _built(self) -> BuiltRank:
        self._supervisor.progress.life.check()
        if self._rank is None:
            example = self._fallback()
            if example is None and not self._makes_up:
                raise ConfigError(
                    "the model has not been recorded yet; pass example=<a micro-batch> to Engine or Trainer, or train "
                    "or evaluate first"
                )
            with all_rng_untouched(self.device):
                self._build(example)
        assert self._rank is not None
        return self._rank

    def _begin(
        self, inputs: Inputs, function: LossFunction, key: DropoutKey | None
    ) -> tuple[BuiltRank, LossRun | None]:
        """Returns the rank, built with the first micro-batch unless it is already, and whose loss then has begun."""
        self._supervisor.progress.life.check()
        if self._rank is not None:
            return self._rank, None
        with all_rng_untouched(self.device):
            begun = self._build(None, First(inputs=dict(inputs), function=function, key=key))
        return self._built(), None if begun is None else begun.for_the_step()

    def build(self) -> None:
        """Cuts the model, if no step has done so, and runs what waits for it (`on_build`); all ranks call."""
        self._built()

    def attach(self, optimizer: Optimizer) -> None:
        """Makes `optimizer.step()` part of DP.sync: it returns at once, each layer is updated before its next forward.

        For a training loop of one's own, which calls `run`, `grad_norm` or `clip_grad_norm`, `optimizer.step()` and
        reads weights after `flush`. Gradients are then not in `.grad` (see `run`). One given to the constructor is
        attached already. With one replica `optimizer.step()` stays as it is.

        Raises: ConfigError when dp_sync="zero1" or offload_optimizer cannot be with this optimizer or host.
        """
        rank = self._built()
        if self.optimizer is not None:
            raise ConfigError("this engine has an optimizer already")
        self.optimizer = optimizer
        cut_state(optimizer, rank.cut.parameters, rank.cut.parts)
        with all_or_none(self.world) if self.config.offload_optimizer else contextlib.nullcontext():
            # What holds for all stages: all ranks raise, or none.
            rank.step.attach(optimizer, parts=self.strategy.dp_sync in ("zero1", MIXED))

    def _follow(self, strategy: Strategy) -> None:
        """The steps from now on are the strategy's."""
        before, self._strategy = self._strategy, strategy
        if before is None or (before.schedule, before.group_size) != (strategy.schedule, strategy.group_size):
            self.programs = Programs.of(strategy)

    # One's own loop, or a trainer's

    def run(
        self,
        micro_batches: list[Inputs],
        loss_fn: Callable[[Module, Inputs], torch.Tensor],
        *,
        reads_weights: bool = True,
        reads_gradients: bool = False,
    ) -> torch.Tensor:
        """Runs forward, backward and the gradient sums of one optimizer step; all ranks call.

        Afterwards `.grad` of this rank's parameters is the mean over the replicas. An attached optimizer takes them
        from elsewhere: reading `.grad` then raises ConfigError, unless `reads_gradients`. The global RNG is as before.

        Args:
            micro_batches: this replica's, the same on each of its ranks.
            loss_fn: (model, micro_batch) -> this micro-batch's share of the replica's loss, scalar. Shares of a replica
                add up to its loss; the global loss is the mean over the replicas. Runs once per micro-batch on every
                rank; where the model's last chunk is on another one, the model call inside does not return.
            reads_weights: whether `loss_fn` may read weights otherwise than by calling the model; False lets layers be
                updated one by one while others compute.
            reads_gradients: whether `.grad` is read or changed before `optimizer.step()`, which steps what it finds;
                all ranks say the same, and all replicas make the same of them.
        Returns: the replica's loss, scalar, on each of its ranks, in the dtype of the model's widest parameter (at
            least fp32).
        """
        if not micro_batches:
            raise ValueError("run needs at least one micro-batch")
        check_batches(micro_batches)
        loss_fn = loss_fn if self._scaler is None else self._scaler.scaled(loss_fn)
        number = self.step_index
        rank, begun = self._begin(micro_batches[0], loss_fn, (self.config.seed, number, self.topology.dp_rank))
        self.step_index += 1
        return rank.step.run(
            *(number, self._replan, lambda parts: self.programs.training(parts), micro_batches, loss_fn, begun),
            reads_weights=reads_weights,
            reads_gradients=reads_gradients,
        )

    def _replan(self, micro_batches: int) -> None:
        """Keeps what was found to be better for the next steps."""
        better = self._built().step.replan(self.strategy, self.programs.training(micro_batches))
        if better is not None:
            self._follow(better)

    def grad_norm(self) -> torch.Tensor:
        """Returns the exact global gradient norm, the same on every rank, on the engine's device; all ranks of the job
        call. The host does not wait until it is there.

        With a loss scaler gradients are unscaled first, if they are not yet, as `scaler.unscale_(optimizer)` does.
        """
        step = self._built().step
        norm = None if self._scaler is None else self._scaler.unscaled_norm()
        return step.grad_norm() if norm is None else norm

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients to a global norm of at most `max_norm`; returns the norm before; all ranks call.

        With an optimizer attached they are scaled when it steps. With a loss scaler they are unscaled first.
        """
        norm = self.grad_norm()
        self._built().step.scale(gradients.clip_coefficient(norm, max_norm))
        return norm

    def flush(self) -> None:
        """Brings this rank's parameters up to date, which `optimizer.step()` may have left to the next forward."""
        if self._rank is None and not self._supervisor.progress.life.is_raised:  # as the user made them, or final
            return
        self._built().step.flush()

    def forward(self, batch: Inputs, fn: Callable[[Module, Inputs], Any]) -> Any:
        """Returns fn(model, batch) without gradients, the last chunk's result on every rank of the replica.

        Args:
            batch: any batch size, the same on each rank of the replica.
            fn: runs once on every rank; where the model's last chunk is on another one, the model call inside does not
                return. Its result may be any nesting of tensors and plain Python values.
        """
        check_batches([batch])
        rank, begun = self._begin(batch, fn, None)
        return rank.step.evaluate(self.programs.evaluation(), batch, fn, begun)

    # The whole step

    def step(self, batch: Inputs) -> StepOutput:
        """Runs one optimizer step on this replica's batch; all ranks call.

        With several replicas, layers are updated when their next forward begins: parameters read directly afterwards
        (`model.parameters()`, an average of weights) are complete after `flush`.

        Args:
            batch: tensors by argument name; dimension 0 is divided into config.micro_batches micro-batches.
                Other values go to every micro-batch unchanged.
        """
        check_batches([batch])
        micro_batches = split_batch(batch, self.config.micro_batches)
        if self._make_optimizer is None and self.optimizer is None:
            raise ConfigError("step needs an optimizer: pass optimizer=functools.partial(torch.optim.AdamW, lr=...)")
        replica_loss = self.run(micro_batches, self._share_of_loss(micro_batches), reads_weights=False)
        rank = self._built()
        assert self.optimizer is not None
        mean, norm = rank.step.optimize(replica_loss, self.optimizer, self.max_grad_norm, self._scaler)
        return StepOutput(loss=mean, grad_norm=norm, make_breakdown=rank.step.breakdown_later())

    def evaluate(self, batch: Inputs) -> torch.Tensor:
        """Returns the global batch's loss without gradients, in evaluation mode; any batch size; all ranks call."""
        check_batches([batch])
        was_training = self.model.training
        self.model.eval()
        try:
            share = self.forward(batch, self._share_of_loss([batch]))
            return self._built().step.mean_loss(share)
        finally:
            self.model.train(was_training)

    def breakdown(self) -> StepBreakdown:
        """Returns where this rank's time went in the last `run`."""
        return self._built().step.breakdown_later()()

    def record_tp_sync(self, record: bool) -> None:
        """Whether breakdowns have every exchange of TP.sync among their records from the next `run` on."""
        if self._rank is None:
            self.on_build.append(lambda: self.record_tp_sync(record))
        else:
            self._rank.recorder.keep_tp_sync(record)

    def _share_of_loss(self, micro_batches: list[Inputs]) -> loss.LossFunction:
        self._supervisor.progress.life.check()
        with self._supervisor.together("counting the labels of the global batch"):
            return loss.share_of(self.model, micro_batches, self.topology.dp, self.world.data.all_reduce)

    # Failures

    def supervise(self, doing: str, *, meets: bool = False) -> AbstractContextManager[None]:
        """Tells the other ranks when the body raises, so that they stop too; all ranks run it.

        Args:
            doing: completes "failed in ...".
            meets: the body ends only when other ranks have come to the same point.
        Raises: RankError when another rank failed or cannot be reached, else what the body raised. fold3d's own errors
            pass untold, unless one rank may be the only one to raise them (`Fold3dError.is_everywhere`).
        """
        return self._supervisor.supervise(doing, meets=meets)

    def meet(self, call: str) -> None:
        """Waits until every rank has come to the same `call`, such as "trainer.save_model()".

        Raises: RankError that names the call when a rank does not come within comm_timeout, or comes to another one.
        """
        if self.topology.world == 1:
            return
        self._built()
        with self._supervisor.together(f"{call}, which every process must call"):
            meet(self.world, call, self.config.timeout_seconds)

    # The end

    def close(self) -> None:
        """Ends communication and gives the model its own forward back. Weights of other ranks stay on meta.

        The engine cannot be used again, nor can the model by another one that needs those weights. A model with parts
        of weights (tp > 1) cannot be called any more, except by another engine.
        """
        self._supervisor.progress.life.close()
        rank, self._rank = self._rank, None
        if rank is not None:
            self._at_exit.detach()
            rank.close()
        if self._world is not None:
            self._world.close()
        if rank is not None:
            rank.cut.coat.close()

    # What is there

    @property
    def is_built(self) -> bool:
        """Whether the model has been recorded and cut; False after an engine is closed, too."""
        return self._rank is not None

    @property
    def hooks(self) -> OptimizerHooks | None:
        """The engine's at the attached optimizer's step; None where that is the optimizer's own."""
        return None if self._rank is None else self._rank.step.hooks

    @property
    def trace(self) -> Trace | None:
        """What was recorded of the model; None for one that is not cut where that was of no use, or not possible."""
        return self._built().cut.trace

    @property
    def strategy(self) -> Strategy:
        """What was decided, by the user, by default or by the planner: the same on every rank. It changes between steps
        when the planner, with measured times, finds another schedule or order of gathers that is faster."""
        self._built()
        assert self._strategy is not None
        return self._strategy

    @property
    def owned(self) -> dict[str, Parameter]:
        """Parameters with storage on this rank, by canonical name."""
        return self._built().cut.parameters

    @property
    def parts(self) -> Parts:
        """Which part of each of them this rank has; the others of its tensor-parallel group have the rest."""
        return self._built().cut.parts

    @property
    def primary(self) -> set[str]:
        """Names of the parameters this rank is responsible for: each of the model, or part of it, belongs to one rank
        of a replica."""
        return set(self._built().cut.primary())

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers this rank's stage is responsible for, by name."""
        return state.own_buffers(self._built().cut)

    @property
    def world(self) -> WorldGroup:
        """All ranks of the job, for what they exchange besides steps; all ranks must ask for it the first time."""
        if self._world is None:
            with self._supervisor.supervise("connecting the ranks", meets=True):
                self._world = WorldGroup(self.topology, self.config.timeout_seconds, self._supervisor.progress)
        return self._world

    @property
    def memory(self) -> MemoryWatch:
        """What this rank has needed of memory, and what was planned."""
        return self._built().memory

    @property
    def groups(self) -> Groups:
        """The groups of this rank: `data`, the replicas of its stage; `pipeline`, the stages of its replica, a process
        group of torch's (None where there is one stage)."""
        return self._built().groups


def _made_up(model: Module) -> Mapping[str, Any]:
    """Returns a micro-batch of one sample. Raises: ConfigError where nobody can make one up."""
    if not is_transformers_model(model):
        raise ConfigError('parallel="auto" runs the model\'s layers to decide: pass example=<a micro-batch> to Engine')
    return synthetic_example(model)
