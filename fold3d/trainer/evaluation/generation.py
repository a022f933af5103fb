"""generate: transformers' own text generation on a model that is spread over the ranks of a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput

from fold3d.device import is_accelerator
from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError

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
    model: Any = engine.model
    if not isinstance(engine.model, GenerationMixin):
        raise ConfigError(f"a {type(model).__name__} has no generate() of transformers' (GenerationMixin)")
    is_cut = engine.topology.pp * engine.topology.tp * engine.strategy.segments > 1
    if is_cut:
        _refuse(model, options)
        model, options = _stand_in(engine, autocast), {**options, "use_cache": False}
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


def has_stock_generate(model: Module) -> bool:
    """Returns whether the model generates by transformers' own code alone."""
    return getattr(type(model), "generate", None) is GenerationMixin.generate


def _is_encoder_decoder(model: Module) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _stand_in(engine: Engine, autocast: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Returns what looks like the model to transformers' decoding loops, and whose call is an evaluation."""
    encoder = _Encoder(engine.model) if _is_encoder_decoder(engine.model) else None

    def run(model: Module, inputs: dict[str, Any]) -> dict[str, Any]:
        with autocast():
            output = model(**inputs)
        return {name: output[name] for name in READ if output.get(name) is not None}

    class StandIn(type(engine.model)):  # type: ignore[misc]
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

    StandIn.__name__ = type(engine.model).__name__  # transformers looks at it
    StandIn.__qualname__ = type(engine.model).__qualname__
    made = object.__new__(StandIn)
    made.__dict__.update(engine.model.__dict__)
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
