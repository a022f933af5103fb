"""EvaluatingTrainer: how the Trainer evaluates, predicts and generates when no rank holds the whole model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput

from fold3d.checkpoint import has_adapters
from fold3d.device import is_accelerator
from fold3d.engine.engine import Engine
from fold3d.engine.loss import Count
from fold3d.errors import ConfigError
from fold3d.trace.coat import Coat, Wrap
from fold3d.trainer.loss_state import LossState
from fold3d.trainer.overrides import is_overridden
from fold3d.trainer.same_arguments import compare_lengths
from fold3d.trainer.saving import CheckpointingTrainer

READ = ("logits", "hidden_states", "attentions")
"""What transformers' decoding loops read of a decoder's output, beside its cache."""


def generate(
    engine: Engine,
    *args: Any,
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    **options: Any,
) -> Any:
    """Returns what `engine.model.generate(*args, **options)` would return in one process, in evaluation mode.

    Every rank of a replica calls it with the same arguments and gets the same result; replicas need not have the same
    prompts. Sampling draws from the generator of the replica's first rank, whose state the others take over.

    transformers' own decoding loop runs on every rank. Where the model is cut, each of its forwards is an evaluation
    over all chunks and nothing is cached: every token costs a forward of all tokens before it. A model that is whole on
    each process generates as it does without fold3d.

    Args:
        args, options: as transformers' `GenerationMixin.generate` takes them.
        autocast: the context that the model's forward runs in.
    Raises: ConfigError for what cannot generate; RankError, on every rank, when any rank fails.
    """
    model: Any = _decoding(engine.model)
    decodes = isinstance(model, GenerationMixin)
    if not decodes:
        raise ConfigError(f"a {type(model).__name__} has no generate() of transformers' (GenerationMixin)")
    is_cut = engine.topology.pp * engine.topology.tp * engine.strategy.segments > 1
    if is_cut:
        _refuse(model, options)
        model, options = _stand_in(engine, model, autocast), {**options, "use_cache": False}
    engine.flush()
    was_training = engine.model.training
    engine.model.eval()
    try:
        with engine.supervise("generating"), contextlib.nullcontext() if is_cut else autocast():
            _share_generators(engine)
            return type(model).generate(model, *args, **options)
    finally:
        engine.model.train(was_training)


def _refuse(model: Module, options: dict[str, Any]) -> None:
    name = type(model).__name__
    if not has_stock_generate(model):
        raise ConfigError(
            f"{name} has a generate() of its own, which may call parts of the model that are on other processes: set "
            "pp=1, tp=1 and segments=1, or generate from what save_model() wrote"
        )
    if options.get("use_cache"):
        raise ConfigError("use_cache=True: a model that is cut generates without a cache; leave use_cache out")
    if options.get("assistant_model") is not None or options.get("prompt_lookup_num_tokens"):
        raise ConfigError("assisted generation needs a cache, and a model that is cut generates without one")
    if not _is_encoder_decoder(model):
        return
    settings = options.get("generation_config") or getattr(model, "generation_config", None)
    for setting in ("output_attentions", "output_hidden_states"):
        if options.get(setting, getattr(settings, setting, None)):
            raise ConfigError(f"{setting}=True: an encoder-decoder that is cut generates tokens and scores only")
    if options.get("encoder_outputs") is not None:
        raise ConfigError(f"encoder_outputs: where a {name} is cut, its encoder runs with its decoder; pass its inputs")


def _decoding(model: Any) -> Any:
    """Returns the model whose decoding loop runs: of one with adapters the one that these are in, unless they are
    prompts, which PEFT puts in front of the tokens."""
    if has_adapters(model) and not any(one.is_prompt_learning for one in model.peft_config.values()):
        return model.get_base_model()
    return model


def has_stock_generate(model: Module) -> bool:
    """Returns whether the model generates by transformers' own code alone."""
    return getattr(type(_decoding(model)), "generate", None) is GenerationMixin.generate


def _is_encoder_decoder(model: Module) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _stand_in(engine: Engine, decoding: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Returns what looks like the model `decoding` to transformers' loops, and whose call is an evaluation."""
    encoder = _Encoder(decoding) if _is_encoder_decoder(decoding) else None

    def run(model: Module, inputs: dict[str, Any]) -> dict[str, Any]:
        with autocast():
            output = model(**inputs)
        return {name: output[name] for name in READ if output.get(name) is not None}

    class StandIn(type(decoding)):  # type: ignore[misc]
        @property
        def device(self) -> torch.device:
            return engine.device  # the first parameter may be another rank's, on meta

        def get_encoder(self, *args: Any, **options: Any) -> Any:
            return super().get_encoder(*args, **options) if encoder is None else encoder

        def __call__(self, **inputs: Any) -> ModelOutput:
            given = {name: value for name, value in inputs.items() if value is not None}
            if encoder is None:
                return CausalLMOutputWithPast(**engine.forward(given, run))
            given.update(encoder.inputs(given.pop("encoder_outputs")))
            return Seq2SeqLMOutput(logits=engine.forward(given, run)["logits"])

    StandIn.__name__ = type(decoding).__name__  # transformers looks at it
    StandIn.__qualname__ = type(decoding).__qualname__
    made = object.__new__(StandIn)
    made.__dict__.update(decoding.__dict__)
    return made


class _Encoder:
    """Stands for the encoder of a model that is cut: what it "returns" is what it was asked about.

    So transformers repeats that for beams and samples, as it does with an encoder's output, and each forward of the
    model runs encoder and decoder.
    """

    def __init__(self, model: Any) -> None:
        encoder = model.get_encoder()
        self.forward = encoder.forward  # transformers looks at its signature
        inner = getattr(model, "encoder", None)  # whose name of the input goes first, in GenerationMixin
        self._main = getattr(inner, "main_input_name", None) or model.main_input_name

    def __call__(self, **inputs: Any) -> BaseModelOutput:
        """Returns the encoder's main input in the place of its output."""
        return BaseModelOutput(last_hidden_state=inputs[self._main])

    def inputs(self, output: BaseModelOutput) -> dict[str, Any]:
        """Returns the arguments of the whole model for which `output` stands."""
        return {self._main: output.last_hidden_state}


def _share_generators(engine: Engine) -> None:
    """All ranks of a replica draw the same tokens."""
    on_device = torch.get_device_module(engine.device) if is_accelerator(engine.device) else None
    states = [torch.get_rng_state(), *([on_device.get_rng_state(engine.device)] if on_device else [])]
    states = engine.world.share_replica(states)
    torch.set_rng_state(states[0])
    if on_device:
        on_device.set_rng_state(states[1], engine.device)


@contextlib.contextmanager
def _prepared(trainer: Any) -> Iterator[None]:
    """The batch has been prepared: in the body `_prepare_inputs`, which the stock `prediction_step` calls, returns it
    as it is."""
    attributes = vars(trainer)
    own = attributes.get("_prepare_inputs")
    attributes["_prepare_inputs"] = lambda inputs: inputs
    try:
        yield
    finally:
        del attributes["_prepare_inputs"]
        if own is not None:
            attributes["_prepare_inputs"] = own


class EvaluatingTrainer(CheckpointingTrainer):
    """The evaluating half of `fold3d.Trainer`: batches go through all chunks, results reach every rank."""

    _label_count: tuple[Any] | None = None
    _has_stream = False
    """Whether each process finds out by itself how many batches of the training there are."""
    _collects = False
    """Whether micro-batches of a step are being taken from it."""
    _evaluated = 0
    _loss_state: LossState

    def prediction_step(
        self,
        model: Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluates one batch through all chunks; returns loss, logits and labels on every rank of the replica, as the
        stock Trainer's. All ranks call."""
        if self.model is not self.engine.model:
            self._check_whole("evaluate")
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        stock = super().prediction_step
        # Counting labels talks to the other replicas, which happens outside of the engine's step.
        count = self._get_num_items_in_batch([inputs], self.args.device)
        self._label_count = (count.as_subclass(Count) if isinstance(count, Tensor) else count,)

        def predict(module: Module, batch: dict[str, Any]) -> Any:
            return stock(module, batch, prediction_loss_only, ignore_keys)

        predict.calls_users_code = self._computes_loss_otherwise()  # type: ignore[attr-defined]
        predict.keeps = (self, self.compute_loss, self.compute_loss_func)  # type: ignore[attr-defined]
        predict.reads_only_loss = prediction_loss_only and self._reads_only_loss()  # type: ignore[attr-defined]
        try:
            with self._watching_loss(), _prepared(self):
                loss, logits, labels = self.engine.forward(inputs, predict)
        finally:
            self._label_count = None
        return loss, logits, labels

    def compute_loss(
        self,
        model: Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Returns the loss as the stock Trainer; in an evaluation of several replicas that of one process, too, where
        nobody divides by the labels of all replicas (a classification's): the stock code makes up for that."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        scaled = self.args.average_tokens_across_devices and (self.model_accepts_loss_kwargs or self.compute_loss_func)
        if not isinstance(num_items_in_batch, Count) or num_items_in_batch.used or not scaled:
            return found
        loss, outputs = found if return_outputs else (found, None)
        loss = loss / self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _evaluate_with_whole_model(self) -> None:
        """A `prediction_step` of another class, Seq2SeqTrainer's or the user's, gets a model that it may call, and may
        let `self.model` generate: on every rank the call returns."""
        own = vars(self).get("prediction_step")
        if own is None and type(self).prediction_step is EvaluatingTrainer.prediction_step:
            return
        users = self.prediction_step

        @functools.wraps(users)
        def predict(model: Module, *args: Any, **named: Any) -> Any:
            with self._generating():
                return users(EngineModel(self.engine, model), *args, **named)  # type: ignore[arg-type]

        vars(self)["prediction_step"] = predict

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """`self.model.generate` is `trainer.generate`, as Seq2SeqTrainer calls it."""

        def call(*args: Any, **options: Any) -> Any:  # a function, so copies of the model have no copy of the trainer
            return generate(self.engine, *args, autocast=self.accelerator.autocast, **options)

        with Coat() as coat:
            if has_stock_generate(self.engine.model) and "generate" not in vars(self.model):
                coat.put(Wrap.GENERATE, self.model, {"generate": call})
            yield

    @property
    def _keeps_loss_state(self) -> bool:
        return self.args.pp > 1 and self._computes_loss_otherwise()

    def _share_loss_state(self) -> None:
        """Takes over what the last stage's loss function, and the model behind its blocks, have kept; every rank
        calls."""
        behind = self.engine.attributes_behind if self.args.pp > 1 and self.engine.is_built else ()
        if not behind and not (self._keeps_loss_state and self.engine.is_built):
            return
        model = self.engine.model
        logged = self._loss_state.share(self.engine.world, model, behind, self.args.ddp_timeout)
        now, logs_next = (self.state.global_step, self.state.epoch), self.control.should_log
        for step, epoch, logs in logged:
            self.state.global_step, self.state.epoch = step, epoch
            super().log(logs)
        self.state.global_step, self.state.epoch = now
        self.control.should_log = logs_next  # the stock loop takes any log for the one that is due

    def _watching_loss(self) -> AbstractContextManager[None]:
        """Around code that computes losses."""
        return self._loss_state.watch() if self._keeps_loss_state else contextlib.nullcontext()

    def _computes_loss_otherwise(self) -> bool:
        """Whether the loss is computed by code of the user's."""
        return self.compute_loss_func is not None or is_overridden(self, "compute_loss")

    def _reads_only_loss(self) -> bool:
        """Whether of what the model returns nothing but the loss is read: what a tower's results are carried along for,
        in the object that is returned, then need not be sent. With tp > 1 all calls must need the same."""
        return not self._computes_loss_otherwise() and self.label_smoother is None and self.args.tp == 1

    def evaluate(self, *args: Any, **named: Any) -> Any:
        """Evaluates; arguments and result are those of the stock Trainer. Every process calls and gets the same result.

        Raises: RankError on every process when one fails or does not call.
        """
        if self.engine.is_built:
            self.engine.meet("trainer.evaluate()")
        return self._with_first_metrics(super().evaluate(*args, **named))

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        """Runs the stock evaluation loop."""
        with self.engine.supervise("evaluating"):
            compare_lengths("the evaluation", dataloader, self.engine.world)
            output = super().evaluation_loop(dataloader, *args, **named)
            self._share_loss_state()
        self._with_first_metrics(output.metrics or {})
        self._evaluated = output.num_samples or 0
        return output

    def _compare_counts(self, count: int) -> None:
        """Raises: ConfigError on every process where a stream has ended on some and not on others."""
        bounds = torch.tensor([count, -count])
        self.engine.world.all_reduce(bounds, torch.minimum)
        least, most = int(bounds[0]), -int(bounds[1])
        if least != most:
            raise ConfigError(
                f"process {self.args.process_index} has {count} micro-batches for step {self.state.global_step + 1}, "
                f"one of them {least} and another {most}: a stream must be as long on all (one that is "
                "divided by hand may not be). Repeat it, cut it to the shortest, or set max_steps to what that has"
            )

    def _with_first_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns `metrics` with what process 0 found in it: the best model, its checkpoint and learning rates are
        chosen by them. A metric that is drawn at random, or tells a time, is another one on each."""
        if self.engine.topology.world > 1:
            mine = {name: value for name, value in metrics.items() if _is_pickled(value)}
            first, names = self.engine.world.share((mine, [*metrics]), timeout=self.args.ddp_timeout)
            found = {name: first.get(name, metrics.get(name)) for name in names}
            metrics.clear()
            metrics.update(found)
        return metrics

    def predict(self, *args: Any, **named: Any) -> Any:
        """Predicts; arguments and result are those of the stock Trainer. Every process calls and gets the same result.

        Raises: RankError on every process when one fails or does not call.
        """
        if self.engine.is_built:
            self.engine.meet("trainer.predict()")
        output = super().predict(*args, **named)
        self._correct_speed(output.metrics)
        return output

    def generate(self, *args: Any, **options: Any) -> Any:
        """Returns the tokens that `model.generate(*args, **options)` returns in one process, on any layout.

        Every process calls. Those of a replica pass the same arguments and get the same result; replicas may differ.
        Sampling draws from the generator of the replica's first process. A model that is cut generates without a cache:
        every token costs a forward of all tokens before it.

        Raises: ConfigError for a model without transformers' `generate`, or with one of its own that is cut.
        """
        if self.engine.is_built:
            self.engine.meet("trainer.generate()")
        return generate(self.engine, *args, autocast=self.accelerator.autocast, **options)

    def _correct_speed(self, metrics: dict[str, float] | None) -> None:
        """Corrects evaluation steps per second, which the stock code divides by processes instead of replicas."""
        for key in metrics or {}:
            assert metrics is not None
            runtime = metrics.get(key.replace("_steps_per_second", "_runtime"), 0)
            if key.endswith("_steps_per_second") and key != "train_steps_per_second" and runtime > 0:
                batch = self.args.eval_batch_size * self.accelerator.num_processes
                metrics[key] = round(math.ceil(self._evaluated / batch) / runtime, 3)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self._label_count is not None:
            return self._label_count[0]
        if self._collects:
            self._compare_counts(len(batch_samples))
        return super()._get_num_items_in_batch(batch_samples, device)


def _is_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object of the user's raises
        return False
    return True


class EngineModel:
    """What a `prediction_step` of the user's gets as the model: a call goes through all chunks, without gradients.

    Every rank of the replica calls and gets what the model's forward returns. Attributes are the model's.
    """

    def __init__(self, engine: Engine, model: Module) -> None:
        self._engine, self._model = engine, model

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Returns what the model returns for these arguments, on every rank of the replica; all of them call."""
        if args:
            bound = inspect.signature(self._model.forward).bind_partial(*args)
            named = {**bound.arguments, **named}
        return self._engine.forward(named, lambda module, batch: module(**batch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The model's, for who asks with isinstance whether it is one of PEFT's, say."""
        return type(self._model)
