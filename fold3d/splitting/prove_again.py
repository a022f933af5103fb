"""prove_again(): that a block's split still holds where its code takes another way than when the split was made."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting.block_classes import differs_in_training
from fold3d.splitting.capture import CapturedCall, capture, skeleton_of
from fold3d.splitting.proof import Used, prove, prove_sequence
from fold3d.splitting.sequence import LENGTH, odd_length
from fold3d.stage.replay import ModelValues
from fold3d.trace.arguments import Arguments, with_values
from fold3d.trace.batches import part_of, samples_of
from fold3d.trace.caches import apart_from_caches
from fold3d.trace.capture import trace_call
from fold3d.trace.model_trace import Trace
from fold3d.trace.wrappers import users_hooks

_MOST = 8
"""Pairs of samples that are tried."""
_LONG = 512
"""Tokens of the longest sequences that are tried."""


def prove_again(
    model: nn.Module, trace: Trace, plan: ShardingPlan, arguments: Arguments, wanted: Mapping[str, Collection[int]]
) -> dict[str, str]:
    """Proves the split of some blocks with what the model is called with now, and with its modules as they are now.

    A block runs on two samples of a few tokens. Other samples, padding, or the length, may decide which way its code
    takes: so others are tried, and then longer sequences, until it takes the way that is to be proved.

    Args:
        model: with the forwards of `plan` on it, perhaps cut; it is not touched.
        trace: a recording of the model, with the same blocks.
        arguments: of the model's forward.
        wanted: by the name of each block what ranks then run of torch, as numbers (`Operators`).
    Returns: of each block an empty text, or why it is not proved. Raises: TraceError when the model cannot be run so.
    """
    # A tensor of a class of its own may note who reads it: the loss function does so with num_items_in_batch.
    with torch._C.DisableTorchFunctionSubclass():
        given: Mapping[str, Any] = tree_map_only(Tensor, lambda one: one.detach().as_subclass(Tensor), dict(arguments))
    given = with_values(arguments, given)
    reasons: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), apart_from_caches(model):
        recorded = trace_call(model, list(trace.modules), given).under(plan.tp)
        used = {name: Used() for name in wanted}
        for part, length, pads in _parts(given, odd_length(plan.tp) if plan.sequence else LENGTH + 1):
            calls = capture(model, recorded, part, length, skeleton_of(model, recorded), pads=pads)
            for name in [name for name in wanted if name not in reasons]:
                wrong = _wrong(calls[name], plan, name, used[name])
                took_it = used[name].operators.keys() >= set(wanted[name])
                if wrong or took_it or any(map(_has_hooks, model.get_submodule(name).modules())):
                    reasons[name] = f"divided, {wrong}" if wrong else ""
            if reasons.keys() == wanted.keys():
                return reasons
    for name in wanted.keys() - reasons.keys():
        changed = _changed(calls[name])
        said = f"it changes {changed}, by which it decides" if changed else "copies of it do not take that way"
        reasons[name] = said
    return reasons


def _parts(given: Mapping[str, Any], length: int) -> Iterator[tuple[Mapping[str, Any], int, bool]]:
    """Yields arguments whose first two samples are to be run, how many tokens of them, and whether one is padded."""
    samples = samples_of(given) or 1
    for first in range(0, min(samples, 2 * _MOST), 2):
        part = with_values(given, part_of(given, first, samples, samples)) if first else given
        yield from ((part, length, pads) for pads in (True, False))
    yield from ((given, _LONG, pads) for pads in (True, False))


def _wrong(call: CapturedCall, plan: ShardingPlan, name: str, used: Used) -> str:
    split, sequence = plan.blocks[name], plan.sequence.get(name)
    for training in (False, True) if differs_in_training(call) else (False,):
        if sequence is None:
            wrong, summed = prove(call, split, plan.tp, training, used), set[str]()
        else:
            alone = replace(sequence, begins=True, ends=True)
            wrong, summed = prove_sequence(call, split, plan.tp, alone, training, used)
        if wrong:
            return wrong
        for parameter in sorted(summed):
            shard = plan.shard_of(f"{name}.{parameter}")
            if shard is None or not shard.summed:
                return f"each rank has another share of the gradient of {parameter}"
    return ""


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks of the user's run operators there, which copies do not have."""
    return any(True for _ in users_hooks(module))


def _changed(call: CapturedCall) -> str:
    """Returns the attributes of a block that its forward changes; "" where it changes none."""
    values = ModelValues(call.block)
    with torch.no_grad(), contextlib.suppress(Exception):  # whatever it does without weights
        call.block(*call.args, **call.kwargs)
    return ", ".join(values.restore()[1])
