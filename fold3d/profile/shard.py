"""What layers cost where several ranks share their weights. of_a_shard(): without TP.sync; with_tp_sync(): which
exchanges it makes in each layer; halves_factor(): what computing a micro-batch in several parts costs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fold3d.plan.costs import LayerBytes, Profile, TpExchange
from fold3d.profile.calls import ModuleCall, TensorShape, record_calls, time_call
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.split import BlockSplit, SequenceSplit
from fold3d.trace import Trace
from fold3d.trace.arguments import Arguments
from fold3d.trace.batches import part_of, samples_of

_log = logging.getLogger(__name__)

_ROUNDS = 3

Autocast = Callable[[], AbstractContextManager[Any]]


def of_a_shard(
    profile: Profile,
    trace: Trace,
    sharding: ShardingPlan,
    shapes: Mapping[str, Sequence[int]],
    layers: tuple[LayerBytes, ...] = (),
) -> Profile:
    """Returns the costs on the rank of a tensor-parallel group that has most, without TP.sync.

    Bytes are those of its parts. A layer takes the share of its time that its weights there are of all its weights:
    matrix products are nearly all of the work, and each is divided as its matrix is.

    Args:
        profile: of the whole layers.
        shapes: of all parameters, whole, by canonical name.
        layers: what layers need in memory there; empty: nobody knows, so as much as whole ones.
    """
    part = {name: _largest_share(sharding, name, shape) for name, shape in shapes.items()}
    inside = f"{trace.blocks[0]}."
    first = [name for name in trace.uses[0] if name.startswith(inside)]
    before = [name for name in trace.uses[0] if not name.startswith(inside)]
    parameters = [before, first, *trace.uses[1:]]
    canonical = trace.canonical()

    def share(layer: Sequence[str]) -> float:
        names = [canonical.get(name, name) for name in layer]
        whole = sum(math.prod(shapes[name]) for name in names)
        return sum(math.prod(shapes[name]) * part[name] for name in names) / whole if whole else 1.0

    shares = [share(layer) for layer in parameters]
    return replace(
        profile,
        forward=tuple(time * factor for time, factor in zip(profile.forward, shares, strict=True)),
        backward=tuple(time * factor for time, factor in zip(profile.backward, shares, strict=True)),
        layers=layers or profile.layers,
        inside=tuple(
            replace(one, seconds=tuple(time * factor for time, factor in zip(one.seconds, shares, strict=True)))
            for one in profile.inside
        ),
        gradient_bytes={name: round(size * part[name]) for name, size in profile.gradient_bytes.items()},
        parameter_bytes={name: round(size * part[name]) for name, size in profile.parameter_bytes.items()},
    )


def _largest_share(sharding: ShardingPlan, name: str, shape: Sequence[int]) -> float:
    """Returns how much of a parameter the rank holds that has most of it, 1.0 for all."""
    shard = sharding.shard_of(name)
    if shard is None or not math.prod(shape):
        return 1.0
    return max(shard.length(rank) for rank in range(shard.ranks)) / shard.size


def layers_of_a_shard(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    sharding: ShardingPlan,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[LayerBytes, ...]:
    """Returns what layers need in memory on a rank of a tensor-parallel group; nothing where that cannot be told.

    Args:
        model: its weights are whole, or on the meta device.
        micro_batch: keyword arguments of its forward.
    """
    try:
        return layer_bytes(model, trace, micro_batch, device, autocast=autocast, prepare=prepare, sharding=sharding)
    except Exception as error:  # whatever a model raises on tensors without values
        _log.info("activations count as if they were whole (%s: %s)", type(error).__name__, error)
        return ()


def with_tp_sync(
    profile: Profile,
    model: nn.Module,
    trace: Trace,
    sharding: ShardingPlan,
    micro_batch: Mapping[str, Any],
    autocast: Autocast = nullcontext,
) -> Profile:
    """Returns the costs of a rank of a tensor-parallel group with the exchanges of its layers.

    A region of a block is summed behind each of its exits in the forward, and where it is entered in the backward; an
    embedding that is spread in the forward, a head in the backward. Where the ranks share the sequence, each sum is a
    reduce-scatter, and a gathering stands in front of each region.

    Args:
        profile: what `of_a_shard` returned.
        micro_batch: keyword arguments of the model's forward for one micro-batch; only shapes matter.
        autocast: the context in which the model's forward runs.
    """
    wanted = [
        f"{block}.{name}"
        for block, split in sharding.blocks.items()
        for name in {
            *(name for group in split.groups for name in (*group.exits, *group.entries)),
            *(one.module for one in _sequence(sharding, block).gathers),
        }
    ]
    calls: dict[str, ModuleCall] = {}
    modules = dict(model.named_modules())
    try:
        calls = record_calls(model, [name for name in wanted if name in modules], micro_batch, autocast, trace)
    except Exception as error:  # whatever a model raises on tensors without values
        _log.info("TP.sync is taken for as large as what blocks hand on (%s: %s)", type(error).__name__, error)
    forward: list[tuple[TpExchange, ...]] = [()]
    backward: list[tuple[TpExchange, ...]] = [()]
    for number, block in enumerate(trace.blocks):
        split = sharding.blocks.get(block, BlockSplit())
        sizes = _Sizes(calls, block, profile.activation_bytes[number])
        there, back = _of_block(split, _sequence(sharding, block), sizes, shared=block in sharding.sequence)
        forward.append(there)
        backward.append(back)
    ends: list[tuple[TpExchange, ...]] = [(), ()]
    if sharding.vocabulary.embeddings:
        ends[0] = (TpExchange(profile.activation_bytes[0]),)
    if sharding.vocabulary.heads:
        ends[1] = (TpExchange(profile.activation_bytes[-1]),)
    samples = samples_of(micro_batch)
    return replace(
        profile,
        tp_forward=(ends[0], *forward[1:], ()),
        tp_backward=((), *backward[1:], ends[1]),
        halves_factor=None if samples is None else 1.0,
        # As SubPipeline does it.
        sub_micro_batches=2 if samples is None else min(3 if sharding.sequence else 2, samples),
    )


def halves_factor(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    device: torch.device,
    autocast: Autocast = nullcontext,
    seconds: float = 0.5,
    parts: int = 2,
) -> float | None:
    """Returns what computing a micro-batch in `parts` takes, relative to computing it whole; None: it cannot be
    divided.

    The block with most work is timed with the whole micro-batch and with a part of it; 1.0 where it cannot be run
    alone.

    Args:
        seconds: about how long to measure.
    """
    samples = samples_of(micro_batch)
    if samples is None:
        return None
    block = max(zip(trace.costs, trace.blocks, strict=True), key=lambda pair: pair[0].flops)[1]
    size = -(-samples // parts)
    half: dict[str, Any] = part_of(micro_batch, 0, size, samples)
    if isinstance(micro_batch, Arguments):
        half = Arguments.of(micro_batch.module, half)
    times: dict[int, float] = {}
    try:
        module = model.get_submodule(block)
        calls = [record_calls(model, [block], inputs, autocast)[block] for inputs in (micro_batch, half)]
        # In turns: what else the machine does would count for one of them. The fastest of each, as that only adds time.
        for _ in range(_ROUNDS):
            for number, call in enumerate(calls):
                timing = time_call(module, call, device, seconds=seconds / 2 / _ROUNDS, autocast=autocast)
                times[number] = min(times.get(number, math.inf), timing.forward + timing.backward)
    except Exception as error:  # made-up values: anything may go wrong in foreign code
        _log.info("'%s' cannot be measured alone (%s: %s)", block, type(error).__name__, error)
        return 1.0
    # Less than the whole, and more than the whole for each part, is noise.
    return min(float(parts), max(1.0, times[1] * samples / size / times[0]))


def shard_profile(
    whole: Profile,
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    sharding: ShardingPlan,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> Profile:
    """Returns the costs on the rank of a tensor-parallel group that has most, with the exchanges of its layers.

    Args:
        whole: of the whole layers; the others as for `layers_of_a_shard`.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    layers = layers_of_a_shard(model, trace, micro_batch, sharding, device, autocast, prepare)
    shard = of_a_shard(whole, trace, sharding, shapes, layers)
    return with_tp_sync(shard, model, trace, sharding, micro_batch, autocast)


class _Sizes:
    """How large tensors of a block are; where that is not known, as what the block hands on."""

    def __init__(self, calls: Mapping[str, ModuleCall], block: str, handed_on: int) -> None:
        self._calls, self._block, self._handed_on = calls, block, handed_on

    def result(self, name: str) -> int:
        """Bytes that a module returns."""
        call = self._calls.get(f"{self._block}.{name}")
        return self._handed_on if call is None else _largest(call.result)

    def argument(self, name: str) -> int:
        """Bytes that a module is given."""
        call = self._calls.get(f"{self._block}.{name}")
        return self._handed_on if call is None else _largest((call.args, call.kwargs))


def _largest(tree: Any) -> int:
    return max((leaf.bytes for leaf in tree_leaves(tree) if isinstance(leaf, TensorShape)), default=0)


def _sequence(sharding: ShardingPlan, block: str) -> SequenceSplit:
    nothing = SequenceSplit(hidden=(), result=(), dim=0, gathers=(), begins=False, ends=False)
    return sharding.sequence.get(block, nothing)


def _of_block(
    split: BlockSplit, sequence: SequenceSplit, sizes: _Sizes, *, shared: bool
) -> tuple[tuple[TpExchange, ...], tuple[TpExchange, ...]]:
    """Returns what a block exchanges in a forward and in a backward."""
    trips = 1 if shared else 2
    exits = [sizes.result(name) for group in split.groups for name in group.exits]
    hidden = exits[0] if exits else 0
    if not shared:
        entered = [max(map(sizes.argument, group.entries), default=hidden) for group in split.groups]
        return tuple(TpExchange(size, trips) for size in exits), tuple(TpExchange(size, trips) for size in entered)
    forward: list[TpExchange] = []
    backward: list[TpExchange] = []
    regions = list(zip_longest(sequence.gathers, exits))
    for gather, size in regions:
        if gather is not None:
            forward.append(TpExchange(sizes.argument(gather.module), trips, follows=True))
        if size is not None:
            forward.append(TpExchange(size, trips))
    sent = True  # by the layer behind this one
    for gather, size in reversed(regions):
        if size is not None:
            backward.append(TpExchange(size, trips, follows=sent))
        if gather is not None:
            sent = gather.sums
            if sent:
                backward.append(TpExchange(sizes.argument(gather.module), trips))
    if sequence.ends:
        forward.append(TpExchange(hidden, trips, follows=True))
    if sequence.begins:
        backward.append(TpExchange(hidden, trips, follows=True))
    return tuple(forward), tuple(backward)
