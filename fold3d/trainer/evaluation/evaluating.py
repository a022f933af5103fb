"""EvaluatingTrainer: how the Trainer evaluates and predicts when no rank holds the whole model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module

from fold3d.engine.engine import Engine
from fold3d.trainer.evaluation.generation import generate, has_stock_generate
from fold3d.trainer.overrides import is_overridden
from fold3d.trainer.saving import CheckpointingTrainer


class EvaluatingTrainer(CheckpointingTrainer):
    """The evaluating half of `fold3d.Trainer`: batches go through all chunks, results reach every rank."""

    _label_count: tuple[Any] | None = None
    _evaluated = 0

    def prediction_step(
        self,
        model: Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluates one batch through all chunks; returns loss, logits and labels on every rank."""
        inputs = self._prepare_inputs(inputs)
        stock = super().prediction_step
        # Counting labels talks to the other replicas, which happens outside of the engine's step.
        self._label_count = (self._get_num_items_in_batch([inputs], self.args.device),)

        def predict(module: Module, batch: dict[str, Any]) -> Any:
            return stock(module, batch, prediction_loss_only, ignore_keys)

        predict.calls_users_code = self._computes_loss_otherwise()  # type: ignore[attr-defined]
        predict.keeps = (self, self.compute_loss, self.compute_loss_func)  # type: ignore[attr-defined]
        predict.reads_only_loss = prediction_loss_only and self._reads_only_loss()  # type: ignore[attr-defined]
        try:
            loss, logits, labels = self.engine.forward(inputs, predict)
        finally:
            self._label_count = None
        return loss, logits, labels

    def _evaluate_with_whole_model(self) -> None:
        """A `prediction_step` of another class, Seq2SeqTrainer's or the user's, gets a model that it may call, and may
        let `self.model` generate: on every rank the call returns."""
        if type(self).prediction_step is EvaluatingTrainer.prediction_step:
            return
        users = self.prediction_step

        @functools.wraps(users)
        def predict(model: Module, *args: Any, **named: Any) -> Any:
            with self._generating():
                return users(WholeModel(self.engine, model), *args, **named)  # type: ignore[arg-type]

        setattr(self, "prediction_step", predict)  # noqa: B010

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """`self.model.generate` is `trainer.generate`, as Seq2SeqTrainer calls it."""

        def call(*args: Any, **options: Any) -> Any:  # a function, so copies of the model have no copy of the trainer
            return generate(self.engine, *args, autocast=self.accelerator.autocast, **options)

        own = vars(self.model)
        if not has_stock_generate(self.engine.model) or "generate" in own:
            yield
            return
        own["generate"] = call
        try:
            yield
        finally:
            del own["generate"]

    def _computes_loss_otherwise(self) -> bool:
        """Whether the loss is computed by code of the user's."""
        return self.compute_loss_func is not None or is_overridden(self, "compute_loss")

    def _reads_only_loss(self) -> bool:
        """Whether of what the model returns nothing but the loss is read: what a tower's results are carried along for,
        in the object that is returned, then need not travel. With tp > 1 all calls must need the same."""
        return not self._computes_loss_otherwise() and self.label_smoother is None and self.args.tp == 1

    def evaluate(self, *args: Any, **named: Any) -> Any:
        """Evaluates; the same arguments and result as the stock Trainer's. Every process calls."""
        if self.engine.is_built:
            self.engine.meet("trainer.evaluate()")
        return super().evaluate(*args, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Runs the stock evaluation loop."""
        with self.engine.supervise("evaluating"):
            output = super().evaluation_loop(*args, **named)
        self._evaluated = output.num_samples or 0
        return output

    def predict(self, *args: Any, **named: Any) -> Any:
        """Predicts; the same arguments and result as the stock Trainer's. Every process calls."""
        if self.engine.is_built:
            self.engine.meet("trainer.predict()")
        output = super().predict(*args, **named)
        self._correct_speed(output.metrics)
        return output

    def generate(self, *args: Any, **options: Any) -> Any:
        """Returns what `model.generate(*args, **options)` would in one process, on any layout. Every process calls.

        The processes of a replica pass the same arguments, get the same result and, when sampling, draw from the
        generator of the replica's first process. A model that is cut generates without a cache: every token costs a
        forward of all tokens before it.

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
        return super()._get_num_items_in_batch(batch_samples, device)


class WholeModel:
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
