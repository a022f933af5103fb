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
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fold3d import schedule as schedules
from fold3d.comms.consistency import all_or_none
from fold3d.comms.groups import Groups, place_in_job
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.optimizer.hooks import OptimizerHooks
from fold3d.data_parallel.optimizer.parameter_state import cut_state
from fold3d.device import all_rng_untouched, default_device, make_current
from fold3d.engine import loss, state
from fold3d.engine.arguments import (
    check_arguments,
    check_batches,
    check_compiled,
    check_model,
    refuse_odd_buffers,
    refuse_others_parameters,
    refuse_two_in_one,
)
from fold3d.engine.builder import connect
from fold3d.engine.built import BuiltRank
from fold3d.engine.loss_scaler import LossScaler
from fold3d.engine.meeting import meet
from fold3d.engine.planning.cut_model import BuildRequest, CutModel, First, cut_model
from fold3d.engine.planning.mesh import Asked, decide_mesh
from fold3d.errors import ConfigError, NotRecordedError
from fold3d.faults.supervisor import supervisor_of_engine
from fold3d.observe.memory import MemoryWatch
from fold3d.observe.step_breakdown import StepBreakdown, StepOutput
from fold3d.plan.programs import Programs
from fold3d.plan.resolve import followed, programs_of, resolve_auto
from fold3d.plan.strategy import MIXED, Strategy
from fold3d.stage.loss_run import LossRun
from fold3d.stage.micro_batch import DropoutKey, Inputs, LossFunction, split_batch
from fold3d.topology import Topology
from fold3d.torch_private import ask_for_norms
from fold3d.trace import Trace
from fold3d.trace.batches import is_transformers_model, samples_of, synthetic_example
from fold3d.weights.empty import folder_of
from fold3d.weights.part_marks import calls_allowed
from fold3d.weights.parts import Parts

_engines: WeakKeyDictionary[Module, weakref.ref[Engine]] = WeakKeyDictionary()
"""Of each model the one that has cut it, or is about to."""


def _norm_of(parameters: list[torch.Tensor] | None, given: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """Returns the norm over all processes of gradients of which an engine's process has a part; None for others, and
    for those of parameters of one stage, which are here or nowhere. All of its processes call with the same parameters.

    Raises: ConfigError, on all of them, for others.
    """
    for engine in [found for one in _engines.values() if (found := one()) is not None]:
        topology = engine.topology
        if engine._rank is None or topology.pp * topology.tp == 1:
            continue
        own = {id(one): one for one in engine._rank.cut.parameters.values()}
        if parameters is None:
            asks = not {id(one.grad) for one in own.values()}.isdisjoint(map(id, given))
        else:
            asked = set(map(id, parameters))
            if asked and asked.isdisjoint(own) and asked.isdisjoint(map(id, engine.model.parameters())):
                continue
            trained = {number for number, one in own.items() if one.requires_grad}
            told = torch.tensor([asked >= trained, not asked.isdisjoint(own)], dtype=torch.int64)
            engine.world.all_reduce(told)
            have_all, have_some = told.tolist()
            if have_all == topology.world and norm_type == 2:
                return engine.grad_norm()
            asks = have_all == topology.world or have_some > (0 if topology.tp > 1 else topology.dp)
        if asks:
            raise ConfigError(
                f"a norm (norm_type={norm_type:g}) of gradients of which this process has a part (pp={topology.pp}, "
                f"tp={topology.tp}): all processes together compute the L2 norm of all of the model's. Call "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), or engine.clip_grad_norm and "
                "engine.grad_norm"
            )
    return None


ask_for_norms(_norm_of)


class Engine(state.WholeState):
    """Trains `model` as one of dp * tp * pp processes. Every process makes the same calls in the same order.

    The model's own forward runs on every rank, but only the rank's layers compute. The model object is cut in place. A
    model with weights keeps them, each rank its share; all replicas take replica 0's. A model built on the meta device
    gets weights from `weights`, or drawn from (seed, parameter name), and is never whole on any rank.

    The model is cut in the constructor if `example` is a micro-batch or nothing needs to be recorded. Otherwise it is
    cut by the first call that runs it.

    Args:
        model: `forward(**micro_batch)` returns a loss: a scalar tensor, or an object or dict with `loss`.
        config: how the model is spread. With parallel="auto" the constructor chooses the mesh, by running `example`,
            which has as many samples as a micro-batch may have. `engine.config` and `engine.topology` have the choice.
        optimizer: makes the optimizer from a list of this rank's trainable parameters. The list is never empty: a stage
            without any gets a parameter of no elements. Element-wise optimizers (SGD, Adam, AdamW ...) give the result
            of one process. None: `run` and `evaluate` work, `step` does not.
        max_grad_norm: `step` clips the gradients to this global norm. None: no clipping.
        scaler: scales the loss so that fp16 gradients do not vanish. If the gradients of any rank are not finite, the
            parameters of all ranks stay as they are: in `step`, and in your own loop in `scaler.step(optimizer)` and
            `scaler.update()`. Its scale must be the same on all ranks. None: no scaling.
        example: a micro-batch by argument name, with which the model is recorded; or a function that returns one or
            None, called if the model is needed before the first batch. None: the first batch records the model; if it
            is needed earlier, fold3d makes up an example for a HuggingFace model.
        weights: folder with safetensors files for a model on the meta device. None: the folder of `from_pretrained`
            under `empty_weights`, if there is one.
        autocast: makes the context in which `loss_fn`, or the model's forward, runs the layers, such as
            functools.partial(torch.autocast, "cpu", torch.bfloat16). Only the planner uses it, to time layers.
        device: of the parameters. None: this process's accelerator, or the CPU.
        optimizer_like: makes an optimizer like the one that is attached later; the planner tries it. None: AdamW.
        compile_options: arguments of torch.compile for each block, such as {"mode": "max-autotune"}; not with tp. None:
            blocks are not compiled.
        trained_later: returns the names of parameters that are frozen when the model is cut but may be trained later,
            such as an adapter that is switched off. With several replicas no other frozen ones can be.

    A model has one engine: one that cuts a model which another has cut closes that.

    Raises: ConfigError for settings that cannot work, and TraceError for a model that cannot be cut, before any process
        group is made if that can be told without running the model. RankError from every method that runs the model,
        on every rank, when any rank fails.
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
        rank, world = place_in_job()
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
        if world > 1 or constraints.segments != 1:
            refuse_two_in_one(model)
        refuse_odd_buffers(model, world)
        if constraints.segments is not None and config.micro_batch_size is None:  # a bad schedule ends here
            programs_of(config, constraints, self.topology.dp).training(config.micro_batches)
        self.device = make_current(device or default_device())
        if not config.flush and self.device.type != "cpu":
            raise ConfigError(f"flush=False is not available on {self.device.type}; set flush=True")
        self.optimizer: Optimizer | None = None
        self.step_index = 0
        self._forwards = 0, 0  # the step, and how many there were since it
        self.setup_seconds = 0.0
        """Seconds in which the model was recorded, measured, planned for and cut so far."""
        self.planned_memory: int | None = None
        """Bytes that the planner expects the fullest rank to need; None if nothing was planned."""
        self.on_build: list[Callable[[], None]] = []
        """Functions without arguments, called once the model has been cut."""
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
        """Cuts the model. Returns the run of the first micro-batch's loss function, if it has begun."""
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
            before._give_up()
        _engines[self.model] = weakref.ref(self)

    def _give_up(self) -> None:
        """Another engine takes the model."""
        if self._supervisor.progress.life.failure is None:
            self.drain()
        self.close()

    def _connect(self, cut: CutModel) -> BuiltRank:
        self._rank = rank = connect(cut, self._supervisor, self.world, self.device)
        # Threads that outlive the interpreter abort the process: a script that never calls close() must end well.
        self._at_exit = weakref.finalize(self, rank.close)
        if self._scaler is not None:
            self._scaler.follow(rank.step, {id(one) for one in rank.cut.parameters.values()}, self.device)
        return rank

    def recover(self) -> None:
        """Connects the ranks again after a failure that all of them raised; all ranks call.

        Weights are as the failure left them: those from before the step only if no optimizer had stepped yet. So is the
        optimizer's state. With several ranks the optimizer is no longer attached. With one rank nothing happens.

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
                raise NotRecordedError(
                    "the model has not been recorded yet; pass example=<a micro-batch> to Engine or Trainer, or train "
                    "or evaluate first"
                )
            with all_rng_untouched(self.device):
                self._build(example)
        assert self._rank is not None
        return self._rank

    def _begin(
        self, inputs: Inputs, function: LossFunction, key: DropoutKey, *, trains: bool
    ) -> tuple[BuiltRank, LossRun | None]:
        """Returns the rank, built with the first micro-batch unless it is already, and whose loss then has begun."""
        self._supervisor.progress.life.check()
        if self._rank is not None:
            return self._rank, None
        with all_rng_untouched(self.device):
            begun = self._build(None, First(inputs=dict(inputs), function=function, key=key, trains=trains))
        return self._built(), None if begun is None else begun.for_the_step()

    def build(self) -> None:
        """Cuts the model, if no call has done so, and calls the functions in `on_build`; all ranks call.

        Raises: ConfigError without an `example` where none can be made up; TraceError for a model that cannot be cut.
        """
        self._built()

    def attach(self, optimizer: Optimizer, *, replaces: bool = False) -> None:
        """Makes `optimizer.step()` part of DP.sync: it returns at once, and each layer is updated before its next
        forward. All ranks call.

        For your own loop, which calls `run`, `grad_norm` or `clip_grad_norm`, and `optimizer.step()`, and reads weights
        after `flush`. Gradients are then not in `.grad` (see `run`). With one replica `optimizer.step()` stays as it
        is. An optimizer that the constructor made is attached already.

        Args:
            replaces: it takes the place of the one that was attached before, which is left to itself.
        Raises: ConfigError for a second optimizer, and when dp_sync="zero1" or offload_optimizer does not work with
            this optimizer or host.
        """
        rank = self._built()
        if self.optimizer is not None and not replaces:
            raise ConfigError("this engine has an optimizer already")
        if self.topology.world > 1:
            refuse_others_parameters(optimizer, self.model)
        if self.optimizer is not None:
            self.flush()
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

    # For your own loop, or a trainer's

    def run(
        self,
        micro_batches: list[Inputs],
        loss_fn: Callable[[Module, Inputs], torch.Tensor],
        *,
        reads_weights: bool = False,
        reads_gradients: bool = False,
    ) -> torch.Tensor:
        """Runs forwards, backwards and gradient sums of one optimizer step; all ranks call.

        Afterwards `.grad` of this rank's parameters is the mean over the replicas, and what was there before is gone
        (micro-batches of one step go into one `run`). With an attached optimizer, and
        several replicas or gradient_delay=1, gradients lie elsewhere: reading `.grad` then raises ConfigError, unless
        `reads_gradients`. The state of torch's global random generators does not change.

        Args:
            micro_batches: this replica's, the same on each of its ranks; tensors by argument name, of any shapes.
            loss_fn: (model, micro_batch) -> this micro-batch's share of the replica's loss, scalar. The shares add up
                to the replica's loss; the global loss is the mean over the replicas. Runs once per micro-batch on every
                rank. On a rank without the model's last chunk the model call inside does not return.
            reads_weights: whether all weights are up to date when `loss_fn` begins. Otherwise layers are updated one by
                one, before they run or anybody reads or writes their parameters; only what reads a parameter's memory
                by another name (a view, or `.data`, kept from before) needs True.
            reads_gradients: whether `.grad` is read or changed before `optimizer.step()`, which then steps with what
                is there. All ranks pass the same, and all replicas change the gradients in the same way.
        Returns: the replica's loss, scalar, the same on each of its ranks: fp64 where the losses are, else in torch's
            default dtype.
        Raises: ValueError without micro-batches; ConfigError where an attached optimizer has not taken the gradients of
            the run before (`optimizer.zero_grad()` drops them); RankError on every rank when any rank fails.
        """
        if not micro_batches:
            raise ValueError("run needs at least one micro-batch")
        check_batches(micro_batches)
        loss_fn = loss_fn if self._scaler is None else self._scaler.scaled(loss_fn)
        number = self.step_index
        key = (self.config.seed, number, self.topology.dp_rank)
        rank, begun = self._begin(micro_batches[0], loss_fn, key, trains=True)
        rank.step.sync.check_taken()
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
        """Returns the exact global gradient norm (L2, over all parameters), scalar, the same on every rank, on the
        engine's device. All ranks of the job call. On a GPU the host does not wait for it.

        With a loss scaler gradients that are still scaled are unscaled first, as by `scaler.unscale_(optimizer)`.
        """
        step = self._built().step
        norm = None if self._scaler is None else self._scaler.unscaled_norm()
        return step.grad_norm() if norm is None else norm

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients to a global norm of at most `max_norm`; all ranks of the job call.

        Gradients of an attached optimizer are scaled when it steps. With a loss scaler they are unscaled first.

        Returns: the norm before, as `grad_norm`.
        """
        norm = self.grad_norm()
        self._built().step.scale(gradients.clip_coefficient(norm, max_norm))
        return norm

    @property
    def attributes_behind(self) -> tuple[str, ...]:
        """Attributes of the model's modules, no buffers, and of objects that these hold, that its code behind the
        blocks changes: where the model is cut, only the last stage runs that. Known once the model is cut, the same on
        all ranks."""
        trace = self._built().cut.trace
        buffers = dict(self.model.named_buffers())
        return () if trace is None else tuple(name for name in trace.behind if name not in buffers)

    def flush(self) -> None:
        """Completes the updates of this rank's parameters that `optimizer.step()` has left to the next forward.

        Any rank may call it alone.
        """
        if self._rank is None and not self._supervisor.progress.life.is_raised:  # as the user made them, or final
            return
        self._built().step.flush()

    def forward(self, batch: Inputs, fn: Callable[[Module, Inputs], Any]) -> Any:
        """Returns, on every rank of the replica, what fn(model, batch) returns on the rank of the model's last chunk.
        Computes no gradients.

        All ranks of the replica call; if the model is not cut yet, all ranks of the job. Evaluation mode is the
        caller's business: a module in training mode drops out. What the model draws depends on the seed, the step, how
        many forwards there were since it, and the replica; the state of torch's global random generators does not
        change.

        Args:
            batch: tensors by argument name, of any batch size, the same on each rank of the replica.
            fn: runs once on every rank. On a rank without the model's last chunk the model call inside does not return.
                Its result may be any nesting of tensors and plain Python values.
        Raises: RankError, on every rank, when any rank fails.
        """
        check_batches([batch])
        key = self._key_of_forward()
        rank, begun = self._begin(batch, fn, key, trains=False)
        return rank.step.evaluate(self.programs.evaluation(), batch, fn, begun, key)

    def _key_of_forward(self) -> DropoutKey:
        """Returns that of the random numbers of one more forward."""
        step, count = self._forwards
        count = count + 1 if step == self.step_index else 1
        self._forwards = self.step_index, count
        return self.config.seed, self.step_index, self.topology.dp_rank - count * self.topology.dp

    # The whole step

    def step(self, batch: Inputs) -> StepOutput:
        """Runs one optimizer step on this replica's batch; all ranks call.

        With several replicas a layer is updated when its next forward begins: call `flush` before you read parameters
        (`model.parameters()`, an average of weights).

        Args:
            batch: tensors by argument name. Dimension 0 of each is divided into config.micro_batches micro-batches.
                Other values go to every micro-batch unchanged.
        Raises: ConfigError without an optimizer; ValueError for a tensor whose dimension 0 does not divide; RankError,
            on every rank, when any rank fails.
        """
        check_batches([batch])
        micro_batches = split_batch(batch, self.config.micro_batches)
        if self._make_optimizer is None and self.optimizer is None:
            raise ConfigError("step needs an optimizer: pass optimizer=functools.partial(torch.optim.AdamW, lr=...)")
        replica_loss = self.run(micro_batches, self._share_of_loss(micro_batches))
        rank = self._built()
        assert self.optimizer is not None
        mean, norm = rank.step.optimize(replica_loss, self.optimizer, self.max_grad_norm, self._scaler)
        return StepOutput(loss=mean, grad_norm=norm, make_breakdown=rank.step.breakdown_later())

    def evaluate(self, batch: Inputs) -> torch.Tensor:
        """Returns the loss of the global batch, scalar, without gradients, in evaluation mode; all ranks call.

        Args:
            batch: this replica's; tensors by argument name, of any batch size.
        """
        check_batches([batch])
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            share = self.forward(batch, self._share_of_loss([batch]))
            return self._built().step.mean_loss(share)
        finally:
            for module, mode in training.items():
                module.training = mode

    def breakdown(self) -> StepBreakdown:
        """Returns where this rank's time went in the last `run`. Any rank may call it alone."""
        return self._built().step.breakdown_later()()

    def record_tp_sync(self, record: bool) -> None:
        """Sets whether breakdowns have every exchange of TP.sync among their records, from the next `run` on."""
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
        """Returns a context that tells the other ranks when its body raises, so that they stop too; all ranks run it.

        Args:
            doing: completes the sentence "failed in ...".
            meets: whether the body waits for the other ranks.
        Raises: RankError when another rank has failed or cannot be reached, otherwise what the body raised. Errors of
            fold3d that every rank raises by itself (`Fold3dError.is_everywhere`) are not sent.
        """
        return self._supervisor.supervise(doing, meets=meets)

    def meet(self, call: str) -> None:
        """Waits until every rank has made the same `call`, such as "trainer.save_model()"; all ranks call.

        Raises: RankError that names the call when a rank does not make it in time, or makes another one.
        """
        if self.topology.world == 1:
            return
        self._built()
        with self._supervisor.together(f"{call}, which every process must call"):
            meet(self.world, call, self.config.timeout_seconds)

    # The end

    def close(self) -> None:
        """Ends communication and gives the model its own forward back. Weights of other ranks stay on the meta device.

        The engine cannot be used again. Another engine can use the model only if it needs no weights of other ranks. A
        model with parts of weights (tp > 1) cannot be called any more, except by another engine.
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
        """Whether the model has been recorded and cut; False after `close`."""
        return self._rank is not None

    @property
    def hooks(self) -> OptimizerHooks | None:
        """The hooks by which an attached optimizer steps; None if it steps by itself."""
        return None if self._rank is None else self._rank.step.hooks

    @property
    def trace(self) -> Trace | None:
        """What was recorded of the model; None if it is not cut and nothing had to be, or could be, recorded."""
        return self._built().cut.trace

    @property
    def strategy(self) -> Strategy:
        """All that was decided, by the user, by default or by the planner; the same on every rank. It changes between
        steps when the planner finds, by measured times, a faster schedule or order of gathers (`retune`)."""
        self._built()
        assert self._strategy is not None
        return self._strategy

    @property
    def owned(self) -> dict[str, Parameter]:
        """Parameters that this rank holds, by the model's names; with tp > 1 this rank's parts of them."""
        return self._built().cut.parameters

    @property
    def parts(self) -> Parts:
        """Which part of each parameter in `owned` this rank has; the tensor-parallel group has the rest."""
        return self._built().cut.parts

    @property
    def primary(self) -> set[str]:
        """Names of the parameters that this rank saves and counts: of several ranks of a replica that hold the same
        parameter, or part of it, one does."""
        return set(self._built().cut.primary())

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers that this rank's stage saves, by name."""
        return state.own_buffers(self._built().cut)

    @property
    def world(self) -> WorldGroup:
        """All ranks of the job, for exchanges besides steps; all ranks must read it the first time."""
        if self._world is None:
            with self._supervisor.supervise("connecting the ranks", meets=True):
                self._world = WorldGroup(self.topology, self.config.timeout_seconds, self._supervisor.progress)
        return self._world

    @property
    def memory(self) -> MemoryWatch:
        """The memory that this rank has needed, and that was planned."""
        return self._built().memory

    @property
    def groups(self) -> Groups:
        """The groups of this rank: `data`, the replicas of its stage; `pipeline`, the stages of its replica, one of
        torch's process groups (None with one stage)."""
        return self._built().groups


def _made_up(model: Module) -> Mapping[str, Any]:
    """Returns a micro-batch of one sample. Raises: ConfigError where nobody can make one up."""
    if not is_transformers_model(model):
        raise ConfigError('parallel="auto" runs the model\'s layers to decide: pass example=<a micro-batch> to Engine')
    return synthetic_example(model)
