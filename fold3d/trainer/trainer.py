"""Trainer: transformers.Trainer whose steps run on the Engine."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils.dataclasses import DynamoBackend
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import has_length, seed_worker

from fold3d.checkpoint import OptimizerLayout, last_committed, manifest
from fold3d.config import AUTO
from fold3d.data_parallel.optimizer.hooks import has_hooks
from fold3d.device import all_rng_untouched
from fold3d.engine.engine import Engine
from fold3d.engine.planning.mesh import Asked, Decision, decide_mesh
from fold3d.errors import ConfigError
from fold3d.stage.loss_run import running_loss
from fold3d.stage.users_state import as_it_was, namespace_of
from fold3d.topology import Topology
from fold3d.trace.batches import synthetic_example
from fold3d.trace.state import plain, set_attribute
from fold3d.trainer.accelerator import ReplicaAccelerator
from fold3d.trainer.arguments import RANDOM, TrainingArguments
from fold3d.trainer.events import EventHandler, implements
from fold3d.trainer.loss_state import LossState
from fold3d.trainer.measuring import counting_parameters, say_peaks
from fold3d.trainer.overrides import (
    METHODS,
    gradient_readers,
    is_overridden,
    refuse_savers,
    require_super,
    wait_before,
)
from fold3d.trainer.preemption import EvaluationEndedError, Preempted, is_asked_to_end, time_left, without_waiting
from fold3d.trainer.reader import building_trainer
from fold3d.trainer.refused import refuse_callbacks, refuse_model
from fold3d.trainer.same_arguments import compare_arguments, compare_lengths
from fold3d.trainer.searching import SearchingTrainer, needs_smaller_batch, try_again
from fold3d.trainer.waiting import ModelThen, Waiting
from fold3d.weights.empty import folder_of
from fold3d.weights.release import MissingWeight, is_released

logger = logging.getLogger(__name__)

_WRITING, _PREEMPTED = "a checkpoint is being written", "asked to end"
"""What all processes hear of each other at the end of a step."""


class Trainer(SearchingTrainer):
    """`transformers.Trainer` for models spread over data-parallel replicas, pipeline stages and tensor-parallel ranks.

    Takes the arguments of the stock Trainer; `args` are `fold3d.TrainingArguments`. The model has its weights or is
    built on the meta device, and is cut in place. Every process makes a Trainer and calls the same methods in the same
    order. `trainer.engine` is the `Engine` that runs the steps.

    Args:
        example: a micro-batch by argument name, with which a model that is cut is recorded. None: the first micro-batch
            of the training or of an evaluation, whichever comes first.

    What differs from the stock Trainer (docs/compatibility.md has all of it):

    - on a process without the model's last chunk the model call inside `compute_loss` does not return;
    - `on_substep_end` is called before the step's computation;
    - a process holds the parameters of its own layers. The others are on the meta device.

    Raises: ConfigError for settings that cannot work, TraceError for a model that cannot be cut.
    """

    reads_weights = True
    """Whether a `save_model` or `_save_checkpoint` that a subclass overrides reads weights, which a process with a part
    of the model does not have."""
    reads_gradients = True
    """Whether an overridden `training_step`, or hooks of the optimizer's step, may read or change gradients. Every step
    then waits for their sums. Set it to False on a class that does neither."""
    _is_empty = _is_made = False
    _gradients_are_read: bool | None = None  # until a training has begun
    _preempted: Preempted | None = None
    _may_end_evaluation = False

    def __init__(
        self,
        model: Module | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        example: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        stock = inspect.signature(transformers.Trainer.__init__)
        if model is not None:
            refuse_model(model)
        elif stock.bind(self, model, args, *others, **named).arguments.get("model_init") is None:
            raise ConfigError("Trainer needs a model, or a model_init that makes one")
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, TrainingArguments):
            raise ConfigError(
                f"args is a {type(args).__module__}.{type(args).__name__}; import TrainingArguments from fold3d too, "
                f"or take fold3d.arguments_class({type(args).__name__})"
            )
        self._given_example = example
        self._has_stepped = Event()
        self._trainable: set[str] = set()
        self._to_load: list[Callable[[], None]] = []
        self.current_gradient_accumulation_steps = 1  # of a training_step outside of train()
        self._waiting = Waiting()
        self._loss_state = LossState(self)
        self._measure_nothing_yet()
        self.layout = None
        self._laid_out: Optimizer | None = None  # of which `layout` is
        with building_trainer():
            super().__init__(model, args, *others, **named)
        refuse_callbacks(self.callback_handler.callbacks)
        if args.layout.is_open:
            self._decide_mesh()
        refuse_savers(self)
        self._place_model()
        self._attend_to(METHODS)
        self._is_made = True
        if self._world is not None and args.comm_timeout is not None:  # where the stock loop gathers, too
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=args.comm_timeout), self._world)

    # Set-up

    def __setattr__(self, name: str, value: Any) -> None:
        """A method that is set on the object (`trainer.compute_loss = ...`) is treated like one of a class."""
        super().__setattr__(name, value)
        if self._is_made and name in METHODS:
            refuse_savers(self)
            self._attend_to([name])

    def _attend_to(self, names: Collection[str]) -> None:
        """Those of these methods that are overridden find what they need."""
        if "prediction_step" in names:
            self._evaluate_with_whole_model()
        if "training_step" in names:
            require_super(self, lambda: self._waiting.added)
        if self.args.async_save:
            wait_before(self, names, self._wait_for_copies)

    def _place_model(self) -> None:
        """Gives `self.model` an engine, and tells whoever works with it; every rank calls."""
        args, model = self.args, self.model
        refuse_model(model)
        # The engine replaces parameters of other ranks: an optimizer the user made knows the objects of before.
        self._before = dict(model.named_parameters())
        self._trainable = _trained(self._before)
        self._to_load.clear()
        self.layout = None
        # What an engine before this one has left to other ranks is no weight without values.
        without = [one for one in self._before.values() if one.is_meta and not is_released(one)]
        self._is_empty = folder_of(model) is None and bool(without)
        if args.weights == RANDOM and not self._is_empty:
            raise ConfigError(f"weights={RANDOM!r} has no effect: the model has weights; remove it")
        self.engine = Engine(
            model,
            args.layout,
            example=self._example if self._given_example is None else self._given_example,
            weights=None if args.weights == RANDOM else args.weights,
            autocast=self.accelerator.autocast,
            device=args.device,
            scaler=self.accelerator.scaler,
            optimizer_like=self._optimizer_like(),
            compile_options=self._compile_options(),
            trained_later=self._trained_later,
        )
        self._tell_of_engine()
        self.engine.on_build.append(self._use_engine)
        if self.engine.is_built:
            self._use_engine()

    def _tell_of_engine(self) -> None:
        self.accelerator.use_replicas(self.engine.world.data, self.model, self.engine.clip_grad_norm)
        callbacks = self.callback_handler.callbacks
        callbacks[:] = [without_waiting(callback) for callback in callbacks]
        EventHandler.adopt(
            *(self.callback_handler, self.engine, self._has_stepped, lambda: self._save_under_way is not None),
            wait=self._wait_for_copies,
            before_update=self._before_update,
            load=self._load_early,
        )
        self.callback_handler.flags.listen(_WRITING, lambda: self._background.is_writing)
        self.callback_handler.flags.listen(_PREEMPTED, lambda: is_asked_to_end(callbacks))

    def _before_update(self) -> None:
        """The optimizer is about to step. Raises: ConfigError for groups that have come since it was divided."""
        self._wait_for_copies()
        if self.layout is not None and len(self._plain_optimizer().param_groups) != len(self.layout.groups):
            self._follow_groups()

    def _hp_search_setup(self, trial: Any) -> None:
        """Sets the arguments of a trial; then a model that `model_init` has made for this training gets its engine."""
        super()._hp_search_setup(trial)
        if self.model is self.engine.model:
            return
        self.engine.close()
        self._measure_nothing_yet()
        with all_rng_untouched(self.args.device):
            self._place_model()

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator count replicas instead of processes."""
        super().create_accelerator_and_postprocess()
        args = self.args
        accelerator = ReplicaAccelerator.adopt(self.accelerator, self._topology())
        if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
            raise ConfigError(
                f"fp16=True has no effect on the {args.device.type}: accelerate trains in full precision there; use "
                "bf16=True, or remove it"
            )
        self.gather_function = functools.partial(
            accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )

    def _topology(self) -> Topology:
        """Returns where this process is in the mesh; as long as that is open, as if each were a replica."""
        config, world = self.args.layout, self.args.world_size
        pp, tp = (1, 1) if config.is_open else (config.pp, config.tp)
        dp = world if config.is_open else config.resolve_dp(world)
        return Topology(dp=dp, pp=pp, tp=tp, rank=self.args.process_index)

    def _decide_mesh(self) -> None:
        """parallel="auto": decides dp, tp, pp and the micro-batches, and writes them into the arguments; every rank
        calls."""
        args = self.args
        refuse_model(self.model)
        named = args.resume_from_checkpoint
        last = Path(named) if isinstance(named, str) else last_committed(args.output_dir or ".")
        example = self._example() if self._given_example is None else self._given_example
        if example is None:
            raise ConfigError(
                'parallel="auto" runs the model\'s layers to decide: pass example=<a micro-batch> to Trainer'
            )
        asked = Asked(
            model=self.model,
            config=args.layout,
            example=example,
            samples=args.train_batch_size,
            device=args.device,
            optimizer=self._optimizer_like(),
            autocast=self.accelerator.autocast,
            compile_options=self._compile_options(),
        )
        args.settle(decide_mesh(asked, None if last is None else Decision.of(manifest.said(last, "mesh"))))
        self._train_batch_size = args.train_batch_size
        ReplicaAccelerator.adopt(self.accelerator, self._topology())

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Returns the samples per optimizer step: those of a micro-batch * micro-batches * replicas."""
        size: int = self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes
        return size

    def _get_dataloader(self, *args: Any, **named: Any) -> Any:
        loader = super()._get_dataloader(*args, **named)
        base = getattr(loader, "base_dataloader", loader)
        if base.worker_init_fn is not None:  # stages of a replica must augment their samples alike
            base.worker_init_fn = functools.partial(
                seed_worker, num_workers=self.args.dataloader_num_workers, rank=self.accelerator.process_index
            )
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, BatchRebalanceSampler):
            dp, m = self.accelerator.num_processes, self.args.gradient_accumulation_steps
            sampler = BatchRebalanceSampler(
                lengths=sampler.lengths,
                effective_batch_size=self.args.train_batch_size * m * dp,
                dp_size=dp,
                grad_accum=m,
                rank=self.accelerator.process_index,
                drop_last=self.args.dataloader_drop_last,
            )
        return sampler

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        compare_arguments(self.args, self.engine.world)
        compare_lengths("the training", train_dataloader, self.engine.world)
        is_indexed = has_length(train_dataloader) and not isinstance(
            getattr(train_dataloader, "dataset", None), IterableDataset
        )
        self._has_stream = self.args.world_size > 1 and not is_indexed
        if self._is_empty and self.args.weights is None and not resume_from_checkpoint:
            raise ConfigError(
                "the model was built on the meta device and has no values: set weights to the folder that they are in, "
                f"or weights={RANDOM!r} to train from values drawn from seed={self.args.seed}"
            )
        self._is_empty = False
        self._check_saves(resume_from_checkpoint)
        timeline = self.args.timeline
        if timeline is not None and timeline > max_steps:
            raise ConfigError(f"timeline={timeline} has no effect: training has {max_steps} steps")
        if timeline is not None and timeline <= self.state.global_step:
            logger.warning("timeline=%s: resumed after step %s, none is written", timeline, self.state.global_step)
        if self.layout is None or self.optimizer is None or self._plain_optimizer() is not self._laid_out:
            self._create_optimizer_over_whole_model()
        self._waiting.clear()
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.count_anew()
        made = self._plain_optimizer()
        if self.engine.is_built and self.engine.optimizer is not made:
            self.engine.attach(made, replaces=True)
        resume = resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume)  # type: ignore[no-untyped-call]
        if self._plain_optimizer() is not made:
            raise ConfigError(
                "create_optimizer made a second optimizer; an override must return self.optimizer when it is set"
            )
        return prepared

    def _create_optimizer_over_whole_model(self) -> None:
        """Makes the optimizer as the stock Trainer would, over all parameters, and keeps this rank's if it is cut."""
        with self._all_trained():
            self.create_optimizer()
        if not self.engine.is_built:
            self._before = dict(self.model.named_parameters())
            return
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.layout = self._layout_of(names)

    def create_optimizer(self, *args: Any, **named: Any) -> Any:
        """As the stock Trainer's: over all parameters, also of a model that is cut."""
        with self._all_trained():
            return super().create_optimizer(*args, **named)

    @contextlib.contextmanager
    def _all_trained(self) -> Iterator[None]:
        """Weights of other ranks, of this training's engine or of an earlier one's, count as trained in the body."""
        missing = [p for p in self.model.parameters() if isinstance(p, MissingWeight) and p.trainable]
        elsewhere = [one for one in missing if not one.requires_grad]  # another one may be around this
        for parameter in elsewhere:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in elsewhere:
                parameter.requires_grad_(False)

    def _use_engine(self) -> None:
        """The model has been cut: the optimizer keeps this rank's parameters, and what is to be loaded is."""
        self._trainable = _trained(self._before)
        names = {id(parameter): name for name, parameter in self._before.items()}
        self._before = {}  # the memory of parameters of other ranks is free
        if self.optimizer is not None:
            self.layout = self._layout_of(names)
            if self.is_in_train:
                self.engine.attach(self._plain_optimizer())
        for load in self._to_load:
            load()
        switch = getattr(self.optimizer, "train", None)
        if self._to_load and self.is_in_train and callable(switch):
            switch()  # as the stock loop has told it before the step: it was loaded as it was saved, to evaluate
        self._to_load.clear()

    def _trained_later(self) -> set[str]:
        """Returns the names of the parameters that were trained when the engine was made, or that the optimizer has."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        return self._trainable | {name for name, parameter in self._before.items() if id(parameter) in stepped}

    def _layout_of(self, names: Mapping[int, str]) -> OptimizerLayout:
        self._laid_out = self._plain_optimizer()
        return OptimizerLayout.restrict(self._laid_out, names, self.engine.owned, self.engine.parts)

    def _compile_options(self) -> dict[str, Any] | None:
        """Returns what the stock Trainer would compile the model with; None where it would not."""
        plugin = self.accelerator.state.dynamo_plugin
        return None if plugin.backend == DynamoBackend.NO else dict(plugin.to_kwargs())

    def _optimizer_like(self) -> Any:
        """Returns what makes an optimizer like the one of this training; None where the stock Trainer cannot tell.

        Raises: ConfigError when its library is not installed.
        """
        if isinstance(self.optimizer, Optimizer):
            return functools.partial(type(self.optimizer), **self.optimizer.defaults)
        try:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
        except Exception as error:  # who wants more than the arguments may make it all the same
            is_own = is_overridden(self, "create_optimizer")
            if "install" in str(error).lower() and not is_own and self.optimizer_cls_and_kwargs is None:
                raise ConfigError(
                    f"optim={getattr(self.args.optim, 'value', self.args.optim)!r} cannot be had: {error}"
                ) from error
            return None
        return functools.partial(kind, **settings)

    def _example(self) -> dict[str, Any] | None:
        """Returns a micro-batch of the training (else evaluation) data, for a model needed before any was drawn.

        Without what the model's forward does not take: an overridden `compute_loss` may have use for it.
        """
        stock = isinstance(self.model, transformers.PreTrainedModel)
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, Mapping):
            dataset = next(iter(dataset.values()), None)
        if dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return self._synthetic_example() if stock else None
        try:
            collator = copy.deepcopy(self.data_collator)
        except Exception as error:  # whatever a collator keeps: a lock, an open file
            if stock:
                return self._synthetic_example()
            raise ConfigError(
                "the model is needed before training has drawn a batch, which a copy of the data collator is to make, "
                f"and that cannot be copied ({type(error).__name__}: {error}): call train() or evaluate() first"
            ) from error
        collate = self._get_collator_with_removed_columns(collator)
        with all_rng_untouched(torch.device("cpu")):
            batch = collate([dataset[i] for i in range(min(len(dataset), self.args.train_batch_size))])
        taken = inspect.signature(self.model.forward).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
        return {name: value for name, value in batch.items() if takes_all or name in taken}

    def _synthetic_example(self) -> dict[str, Any]:
        """Returns a micro-batch of made-up samples: data that only streams is not read before training begins."""
        size = self.args.train_batch_size
        shapes = synthetic_example(self.model)
        return {name: torch.zeros((size, *one.shape[1:]), dtype=one.dtype) for name, one in shapes.items()}

    # Training

    def _train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **named: Any
    ) -> Any:
        with self.engine.supervise("training"), counting_parameters(self._count_trainable):
            self._clean_output_dir()
            self._preempted = self._saved_step = None
            if resume_from_checkpoint is None and trial is None and self.args.resume == AUTO:
                resume_from_checkpoint = self._last_checkpoint()
            self._gradients_are_read = None
            with self._loading_this_time():
                result = super()._train(resume_from_checkpoint, trial, *args, **named)
            self._share_loss_state()
            self.engine.flush()
            say_peaks(self.engine)
        if self._ends_the_script:
            self.end()
            raise SystemExit(0)
        return result

    @property
    def _ends_the_script(self) -> bool:
        return self._preempted is not None and self.args.exit_when_preempted

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **named: Any) -> Any:
        self._has_stepped.clear()
        try:
            with self.engine.supervise("training"):  # which may be another one than when `train` was called
                return super()._inner_training_loop(batch_size, *args, **named)
        except Exception as error:
            if not self.args.auto_find_batch_size or batch_size is None or not needs_smaller_batch(error):
                raise
            told = str(error)
        smaller = try_again(self.engine, told, batch_size, self._has_stepped.is_set(), self.args.ddp_timeout)
        self._tell_of_engine()
        raise smaller

    def _run_epoch(self, *args: Any, **named: Any) -> None:
        if self.args.resume == AUTO and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # the stock loop would make a step more
        else:
            super()._run_epoch(*args, **named)  # type: ignore[no-untyped-call]

    def _count_trainable(self) -> int:
        """Returns how many parameters of the whole model are trained; those of other ranks as they were at first."""
        if not self.engine.is_built:
            return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        owned, parts = self.engine.owned, self.engine.parts
        return sum(
            math.prod(parts.whole_shape(name, parameter.shape))
            for name, parameter in self.model.named_parameters()
            if (parameter.requires_grad if name in owned else name in self._trainable)
        )

    def training_step(
        self, model: Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keeps the micro-batch, and with the last one of the step runs all of them. Every process calls.

        Returns: on the last micro-batch the replica's loss of the step, scalar; before it zero.
        """
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self._wait_for_copies()
            self.optimizer.train()
        steps = self.current_gradient_accumulation_steps
        inputs = self._prepare_inputs(inputs)
        sets_some = any(is_overridden(self, name) for name in ("training_step", "_prepare_inputs"))
        sets_some = sets_some or any(implements(one, "on_substep_end") for one in self.callback_handler.callbacks)
        attributes = namespace_of(self).contents() if sets_some else None
        then = ModelThen(self.model) if sets_some else None
        waiting = self._waiting.add(inputs, (num_items_in_batch, steps), attributes, then)
        if waiting < steps or not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro_batches, drawn_with, sets_model = self._waiting.take()
        modules = list(self.model.modules()) if sets_model else []

        def share(module: Module, batch: dict[str, Any]) -> Tensor:
            divisors, attributes, of_model = drawn_with(batch)
            for name, value in attributes.items():
                setattr(self, name, as_it_was(value))
            for (number, name), value in of_model.items():
                set_attribute(modules[number], name, plain(value))
            return self._share_of_loss(module, batch, *divisors)

        share.calls_users_code = self._computes_loss_otherwise() or sets_model  # type: ignore[attr-defined]
        share.keeps = (self, self.compute_loss, self.compute_loss_func)  # type: ignore[attr-defined]
        share.adds_up = self._loss_adds_up(num_items_in_batch)  # type: ignore[attr-defined]
        share.reads_only_loss = self._reads_only_loss()  # type: ignore[attr-defined]
        if self.args.logging_nan_inf_filter:
            share.sums_losses = self._sum_as_logged  # type: ignore[attr-defined]
        if self._gradients_are_read is None:
            self._gradients_are_read = self._agree_on_gradients()
        if self.args.timeline == self.state.global_step + 1:
            self.engine.record_tp_sync(True)
        with self._watching_loss():
            loss = self.engine.run(
                micro_batches,
                share,
                reads_gradients=self._gradients_are_read,
            )
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self._watch_loss(loss)
        if self.args.logging_nan_inf_filter:
            loss = self._finite(loss, steps)
        return loss.to(self.args.device)

    def _agree_on_gradients(self) -> bool:
        """Returns whether any process has somebody who may look at gradients; every rank calls.

        Raises: ConfigError where they are kept for the next step.
        """
        if self.args.world_size == 1 and not self.args.gradient_delay:
            return False
        ours = (self.engine.optimizer, self.engine.hooks)
        of_the_user = self.optimizer is not None and has_hooks(self._plain_optimizer(), besides=ours)
        readers = gradient_readers(self, of_the_user)
        if readers and self.engine.topology.dp > 1:
            logger.warning(
                "%s may read or change gradients, so every step waits for their sums over the replicas; if it does "
                "neither, set the class attribute reads_gradients = False",
                ", ".join(readers),
            )
        found = torch.tensor(bool(readers))
        self.engine.world.all_reduce(found, torch.logical_or, timeout=self.args.ddp_timeout)
        if found and self.args.gradient_delay:
            raise ConfigError(
                "gradient_delay=1 keeps gradients for the next step, and they may be read or changed in .grad by "
                f"{', '.join(readers) or 'what another process has'}; if nobody does, set the class attribute "
                "reads_gradients = False there, else gradient_delay=0"
            )
        return bool(found)

    def _loss_adds_up(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether it is transformers' own, and divided by the labels of the global batch."""
        own = not self._computes_loss_otherwise() and self.label_smoother is None
        return own and self.model_accepts_loss_kwargs and num_items_in_batch is not None

    def _share_of_loss(self, model: Module, inputs: dict[str, Any], num_items_in_batch: Any, steps: int) -> Tensor:
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if not isinstance(loss, Tensor):
            raise TypeError(f"compute_loss returned a {type(loss).__name__}; it must return a tensor, the loss")
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = scaled or self.compute_loss_func is not None
        return loss if scaled else loss / steps

    def _clip_grad_norm(self, model: Module) -> Tensor:
        return self.engine.clip_grad_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.engine.grad_norm() if grad_norm is None else grad_norm

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as the stock Trainer. What `compute_loss` logs after the model's call, on the last stage only, reaches
        all processes with the next log, evaluation or checkpoint."""
        if self._keeps_loss_state and running_loss() is not None:
            self._loss_state.log(logs)
        else:
            super().log(logs, start_time)

    def end_evaluation_if_asked(self) -> None:
        """Raises EvaluationEndedError on all processes when one of them has been asked to end the training that the
        evaluation belongs to; every process calls."""
        if self._may_end_evaluation:
            asked = torch.tensor(is_asked_to_end(self.callback_handler.callbacks))
            with self.engine.supervise("asking whether the training shall end", meets=True):
                self.engine.world.all_reduce(asked, torch.logical_or)
            if asked:
                raise EvaluationEndedError("the training has been asked to end")

    def _save_preempted(self) -> None:
        """Saves a checkpoint of the step that has just ended, unless there is one or it would not be complete in time,
        leaves a mark of it, and ends the training; every process calls."""
        started, grace = time.perf_counter(), self.args.preemption_grace
        self._share_loss_state()
        self._commit()
        seconds, left = time_left(self.callback_handler.callbacks, grace)
        hurry = torch.tensor([self._seconds_of_save, -left])
        self.engine.world.all_reduce(hurry, torch.maximum, timeout=self.args.ddp_timeout)
        needed, left = float(hurry[0]), -float(hurry[1])
        if self._saved_step is not None and self._saved_step < self.state.global_step and needed > left:
            logger.warning(
                "the last checkpoint took %.1f s, and %.1f s are left (preemption_grace): step %s is not saved, "
                "checkpoint-%s counts",
                *(needed, left, self.state.global_step, self._saved_step),
            )
        elif self._saved_step != self.state.global_step:
            self._save_now(None, is_async=False)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        seconds, _ = time_left(self.callback_handler.callbacks, grace)
        longest = torch.tensor(max(time.perf_counter() - started, seconds))
        self.engine.world.all_reduce(longest, torch.maximum, timeout=self.args.ddp_timeout)
        tokens, steps = self._tokens_trained(), self.state.global_step - self._initial_global_step
        saved = self.state.global_step if self._saved_step is None else self._saved_step
        self._preempted = Preempted(
            step=saved,
            checkpoint=f"checkpoint-{saved}",
            seconds=round(float(longest), 3),
            tokens_done=round(tokens / steps * saved) if tokens else None,
            tokens_left=round(tokens / steps * (self.state.max_steps - saved)) if tokens else None,
        )
        with self._together("marking the end of the training"):
            if self.args.should_save:
                self._preempted.write(Path(self._get_output_dir(None)))
        self.control.should_save = self.control.should_evaluate = False
        self.control.should_training_stop = True

    def _load_best_model(self) -> None:
        if self._preempted is None:  # else the training goes on in another process
            super()._load_best_model()

    def end(self) -> None:
        """Ends communication and destroys the process groups. Call it last; a script need not call it."""
        self.engine.close()
        if self._writers is not None:
            self._writers[0].close()
        super().end()  # type: ignore[no-untyped-call]

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        flags = self.callback_handler.flags
        if self._save_under_way is not None and not flags.heard(_WRITING):
            self._commit()
        if flags.heard(_PREEMPTED) and self._preempted is None:  # saved below, with what is logged of the step
            self.control.should_evaluate = self.control.should_save = False
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._share_loss_state()
        is_ended, self._may_end_evaluation = False, self._preempted is None
        try:
            super()._maybe_log_save_evaluate(*args, **named)
        except EvaluationEndedError:
            is_ended = True
        finally:
            self._may_end_evaluation = False
        if (is_ended or flags.heard(_PREEMPTED)) and self._preempted is None:
            self._save_preempted()


def _trained(parameters: Mapping[str, Any]) -> set[str]:
    """Returns the names of those that are trained; of weights in other processes the engine before knows."""
    return {name for name, one in parameters.items() if getattr(one, "trainable", one.requires_grad)}
