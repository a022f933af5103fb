"""stashes_of(): how many bytes chunks have, at least, that can leave the device between forward and backward, found
without memory.

A forward runs on tensors without values, and what graphs save is counted as csrc/runtime/offload/stash_batch.cpp
takes it: what hooks and checkpoints of the user's own keep is not in it. With tensor parallelism the whole model is
followed for what a rank has a part of; what of that is not certain counts as a part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fold3d import _C
from fold3d.placement.recomputed_blocks import recomputed_blocks
from fold3d.profile.layer_bytes import ShardedTensors, compute_again, has_memory, modules_of
from fold3d.recompute import Recompute
from fold3d.sharding.plan import ShardingPlan
from fold3d.torch_private import StorageLabels, storage_key
from fold3d.trace import Trace
from fold3d.trace.module_results import Crossings, Value
from fold3d.trace.shadow import one_sequence_a_row, shadow_of

_LEAST_BYTES = _C.least_stash_bytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stashes:
    """Of one micro-batch, per chunk, as `schedule.stash_peaks` takes them."""

    kept: tuple[int, ...]
    """What its forward keeps for its backward."""
    sent: tuple[int, ...]
    """What it hands to the next chunk."""


def stashes_of(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    ranges: Sequence[tuple[int, int]],
    pp: int,
    recompute: Recompute,
    *,
    device: torch.device | str = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    sharding: ShardingPlan | None = None,
) -> Stashes:
    """Returns the bytes that move at least; the head's, which are rarely kept, are not among them.

    Args:
        model, trace, micro_batch, device, autocast, sharding: as `profile.layer_bytes`. What a rank of a
            tensor-parallel group has is the mean over the group.
        ranges: blocks [first, end) of every chunk.
    Raises: whatever the forward raises on tensors without values; ConfigError when `recompute` is said of another
        number of chunks.
    """
    without_graph = recompute.without_graph(len(ranges))
    results = _Results(trace.crossings, 1 if sharding is None else sharding.tp)
    with shadow_of(model, device) as shadow:
        arguments, own = shadow.arguments(micro_batch), [*shadow.model.parameters(), *shadow.model.buffers()]
        _prepare(shadow.model, trace, ranges, pp, recompute)
        followed = None if sharding is None else _Followed(ShardedTensors(shadow.model, sharding))
        saved = _Saved(len(ranges), {*_memories(own), *_memories(tree_leaves(dict(arguments)))}, followed)
        for name in results.modules:
            shadow.model.get_submodule(name).register_forward_hook(results.of(name))
        passed = _Passed(saved, ranges)
        for block in trace.modules:
            shadow.model.get_submodule(block).register_forward_hook(passed.ends)
        with one_sequence_a_row(micro_batch), shadow.running(checkpoints=True), followed or nullcontext():
            with torch.enable_grad(), autocast(), saved_tensors_hooks(saved.save, _Kept.unpack):
                returned = shadow.call(arguments)
            moving = saved.bytes()  # while the graph is there, and nothing else
            del returned
    arrives = [0, *(results.bytes_of(trace.crossings[first]) for first, _ in ranges[1:])]
    kept = [of if not again else into for of, again, into in zip(moving, without_graph, arrives, strict=True)]
    return Stashes(kept=tuple(kept), sent=(*arrives[1:], 0))


def _prepare(model: nn.Module, trace: Trace, ranges: Sequence[tuple[int, int]], pp: int, recompute: Recompute) -> None:
    """Has blocks, and modules inside of them, compute again what `recompute` says."""
    for block in recomputed_blocks(trace.blocks, ranges, pp, recompute):
        compute_again(model.get_submodule(block))
    inside: dict[nn.Module, None] = {}
    for (first, end), choice in zip(ranges, recompute.of_chunks(len(ranges)), strict=True):
        for block in trace.blocks[first:end] if choice.patterns else ():
            inside.update(dict.fromkeys(modules_of(model.get_submodule(block), choice)))
    for module in inside:
        compute_again(module)


def _memories(values: Sequence[Any]) -> Iterator[int]:
    return (storage_key(value) for value in values if has_memory(value))


class _Kept:
    """What a graph saves; gone with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        """Returns it."""
        return self._tensor


class _Followed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which storages a rank of a tensor-parallel group has a part of."""

    def __init__(self, parts: ShardedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts = parts
        self._sizes = StorageLabels[tuple[int, int]]()  # bytes of a rank, and of the whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs)) if has_memory(value)]
        given = set(_memories(tensors))
        for leaf in filter(has_memory, tree_leaves(result)):
            if storage_key(leaf) not in given:
                # Embeddings, too, may be shared out along the sequence: as if all were in a block.
                mine = self._parts.bytes_of(func.overloadpacket.__name__, tensors, leaf, in_block=True)
                self._sizes[leaf] = mine, leaf.untyped_storage().nbytes()
        return result

    def bytes_of(self, tensor: Tensor, size: int) -> int:
        """Returns how many bytes a rank has of `size` bytes of a tensor's memory."""
        mine, whole = self._sizes.get(tensor) or (1, 1)
        return size * mine // whole if whole else size


class _Saved:
    """What graphs save, by the chunk that is under way."""

    def __init__(self, chunks: int, staying: set[int], followed: _Followed | None) -> None:
        """Args:
        staying: storages that live on anyway.
        followed: None: a rank has all of everything.
        """
        self._staying, self._followed = staying, followed
        self._chunk = 0
        self._kept: list[list[tuple[weakref.ref[_Kept], int, int, int]]] = [[] for _ in range(chunks + 1)]
        """What, memory, first and last byte, as far as it is a rank's; the last entry is the head's."""

    def turn_to(self, chunk: int) -> None:
        """A chunk begins, or, for the number of chunks, the head."""
        self._chunk = chunk

    def save(self, tensor: Tensor) -> _Kept:
        """A pack hook."""
        kept = _Kept(tensor)
        if tensor.numel() and has_memory(tensor) and not (tensor.is_leaf and tensor.requires_grad):
            key = storage_key(tensor)
            size = tensor.element_size()
            first = tensor.storage_offset() * size
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = first + (last + 1) * size
            if self._followed is not None:
                first, end = (self._followed.bytes_of(tensor, int(one)) for one in (first, end))
            if key not in self._staying and end - first >= _LEAST_BYTES:
                self._kept[self._chunk].append((weakref.ref(kept), key, int(first), int(end)))
        return kept

    def bytes(self) -> list[int]:
        """Returns those of every chunk, of the graphs that are still there."""
        found = []
        for chunk in self._kept[:-1]:
            spans: dict[int, tuple[int, int]] = {}
            for kept, key, first, end in chunk:
                if kept() is not None:
                    low, high = spans.get(key, (first, end))
                    spans[key] = min(low, first), max(high, end)
            found.append(sum(end - first for first, end in spans.values()))
        return found


class _Passed:
    """Turns to the next chunk when the last block of one has ended."""

    def __init__(self, saved: _Saved, ranges: Sequence[tuple[int, int]]) -> None:
        self._saved, self._blocks = saved, 0
        self._next = {end: chunk for chunk, (_, end) in enumerate(ranges, 1)}

    def ends(self, *_: Any) -> None:
        """A hook for when a block ends."""
        self._blocks += 1
        if self._blocks in self._next:
            self._saved.turn_to(self._next[self._blocks])


class _Results:
    """The sizes of what crosses borders: of a recorded example they may be of another precision."""

    def __init__(self, borders: Sequence[Crossings], tp: int) -> None:
        """Args:
        tp: ranks that may have a part each of what crosses.
        """
        self._tp = tp
        self.modules = {crossing.values[0].module for crossings in borders for crossing in crossings}
        self._bytes: dict[Value, int] = {}
        self._calls = dict.fromkeys(self.modules, 0)

    def of(self, name: str) -> Callable[..., None]:
        """Returns a forward hook of a module."""

        def hook(module: nn.Module, args: Any, result: Any) -> None:
            call = self._calls[name]
            self._calls[name] += 1
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for number, tensor in enumerate(tensors):
                self._bytes[Value(name, call, number)] = tensor.numel() * tensor.element_size()

        return hook

    def bytes_of(self, crossings: Crossings) -> int:
        """Returns the bytes of what crosses one border, of tensors that are worth a transfer."""
        sizes = [self._bytes.get(crossing.values[0], 0) // self._tp for crossing in crossings]
        return sum(size for size in sizes if size >= _LEAST_BYTES)
