"""plan_sequence(): how the ranks that share a model's blocks share the sequence of its hidden state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fold3d.sharding.sequence import Gathering, SequenceSplit
from fold3d.sharding.shard import Shard, even_part
from fold3d.sharding.split import BlockSplit, InnerResult, Path
from fold3d.splitting.block_classes import differs_in_training
from fold3d.splitting.probing.capture import SAMPLES, CapturedCall
from fold3d.splitting.probing.readers import with_readers
from fold3d.splitting.proving.inner_results import inner_results
from fold3d.splitting.proving.proof import prove_sequence
from fold3d.splitting.sequence.chains import NoSequenceError, find_chains
from fold3d.splitting.sequence.find import find_gatherings
from fold3d.trace.model_trace import Trace

LENGTH = 7
"""Of the sequences that blocks are proved on, at most; one that leaves a rest where it can be chosen."""


def odd_length(tp: int) -> int:
    """Returns the length of texts to prove on: parts of different lengths are the harder case."""
    for length in range(LENGTH, 1, -1):
        longest, shortest = (end - first for first, end in (even_part(length, tp, 0), even_part(length, tp, tp - 1)))
        if longest > shortest:
            return length
    return LENGTH


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """What `plan_sequence` found."""

    blocks: Mapping[str, SequenceSplit]
    shards: Mapping[str, Shard]
    """Of parameters that work on parts of the sequence, whose gradients are summed."""


@dataclass(frozen=True, slots=True)
class _Found:
    dim: int
    gathers: tuple[Gathering, ...]
    summed: frozenset[str]
    inner: tuple[InnerResult, ...]


def plan_sequence(
    calls: Mapping[str, CapturedCall],
    trace: Trace,
    splits: Mapping[str, BlockSplit],
    tp: int,
    tied: set[str],
    class_of: Callable[[str, CapturedCall], Any],
) -> SharedSequence:
    """Returns how every block works on parts of the sequence, proved on emulated ranks for one block of each class.

    Args:
        splits: how blocks are divided, by name.
        tied: parameters that are read elsewhere, too.
        class_of: what says which blocks are alike.
    Raises: NoSequenceError when it is not possible for all blocks.
    """
    links = find_chains(calls, trace)
    known: dict[Any, _Found] = {}
    blocks: dict[str, SequenceSplit] = {}
    shards: dict[str, Shard] = {}
    for name, call in calls.items():
        link, split = links[name], splits[name]
        key = class_of(name, call), link.hidden, link.result
        if key not in known:
            known[key] = _of_class(name, call, split, link.hidden, link.result, tp)
        found = known[key]
        blocks[name] = SequenceSplit(
            hidden=link.hidden, result=link.result, dim=found.dim, gathers=found.gathers, begins=link.begins,
            ends=link.ends, inner=found.inner,
        )  # fmt: skip
        for parameter in sorted(found.summed):
            full = f"{name}.{parameter}"
            if full in tied:
                raise NoSequenceError(f"{full} is read elsewhere, too")
            shape = call.block.get_parameter(parameter).shape
            shards[full] = Shard.replicated(shape, tp, summed=True)
    return SharedSequence(blocks, shards)


def _of_class(name: str, call: CapturedCall, split: BlockSplit, hidden: Path, result: Path, tp: int) -> _Found:
    if not split.groups:
        raise NoSequenceError(f"{name} is whole on every rank")
    shape = call.shape_at(hidden)
    if shape is None or len(shape) not in (2, 3):
        raise NoSequenceError(f"the hidden state that {name} takes is {None if shape is None else tuple(shape)}")
    reason = f"no module of {name} takes the whole sequence of a region"
    ways = (False, True) if differs_in_training(call) else (False,)
    for gathers in find_gatherings(call, split, hidden):
        for dim, sums in _ways(shape):
            tried = tuple(replace(one, sums=sums) for one in gathers)
            sequence = SequenceSplit(hidden=hidden, result=result, dim=dim, gathers=tried)
            summed: set[str] = set()
            for training in ways:
                wrong, found = prove_sequence(call, split, tp, sequence, training)
                summed |= found
                if wrong:
                    break
            else:
                inner = inner_results(call, split, tp, sequence)
                return _Found(dim, with_readers(call, split, tried), frozenset(summed), inner)
            reason = f"parts of it do not make up {name} ({wrong})"
    raise NoSequenceError(reason)


def _ways(shape: torch.Size) -> Iterator[tuple[int, bool]]:
    """Yields where the sequence lies, behind the samples or in front of them, and how gradients may return."""
    dim = 1 if len(shape) > 2 and shape[0] == SAMPLES else 0
    yield from ((dim, True), (dim, False))
