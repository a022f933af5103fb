"""generate: transformers' own text generation on a model that is spread over the ranks of a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from fold3d.comms.broadcast import broadcast_value
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
            return model.generate(*args, **options)
    finally:
        engine.model.train(was_training)


def _refuse(model: Module, options: dict[str, Any]) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder, which generates only where it is whole: set pp=1, tp=1 and "
            "segments=1, or generate from what save_model() wrote"
        )
    if options.get("use_cache"):
        raise ConfigError("use_cache=True: a model that is cut generates without a cache; leave use_cache out")
    if options.get("assistant_model") is not None or options.get("prompt_lookup_num_tokens"):
        raise ConfigError("assisted generation needs a cache, and a model that is cut generates without one")


def _stand_in(engine: Engine, autocast: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Returns what looks like the model to transformers' decoding loops, and whose call is an evaluation."""

    def run(model: Module, inputs: dict[str, Any]) -> dict[str, Any]:
        with autocast():
            output = model(**inputs)
        return {name: output[name] for name in READ if output.get(name) is not None}

    class StandIn(type(engine.model)):  # type: ignore[misc]
        @property
        def device(self) -> torch.device:
            return engine.device  # the first parameter may be another rank's, on meta

        def __call__(self, **inputs: Any) -> CausalLMOutputWithPast:
            given = {name: value for name, value in inputs.items() if value is not None}
            return CausalLMOutputWithPast(**engine.forward(given, run))

    StandIn.__name__ = type(engine.model).__name__  # transformers looks at it
    StandIn.__qualname__ = type(engine.model).__qualname__
    made = object.__new__(StandIn)
    made.__dict__.update(engine.model.__dict__)
    return made


def _share_generators(engine: Engine) -> None:
    """All ranks of a replica draw the same tokens."""
    group, topology = engine.groups.replica, engine.topology
    if group is None:
        return
    on_device = torch.cuda if engine.device.type == "cuda" else None
    states = [torch.get_rng_state(), *([on_device.get_rng_state(engine.device)] if on_device else [])]
    states = broadcast_value(states, topology.replica(topology.dp_rank)[0], group)
    torch.set_rng_state(states[0])
    if on_device:
        on_device.set_rng_state(states[1], engine.device)
