"""layer_bytes(): the memory that each layer of a model needs in a training step, found without memory.

A forward and a backward run on tensors without values, and every allocation is counted: what the loss, mixed precision
and code between modules need is in it, too. What kernels need inside of themselves is not. Of equal blocks a few run.

inside_of(): the same where modules inside of blocks compute again what their backward needs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fold3d.placement.recomputed_blocks import modules_inside
from fold3d.plan.costs import Inside, LayerBytes
from fold3d.recompute import Choice, Recompute
from fold3d.sharding.plan import ShardingPlan
from fold3d.torch_private import StorageLabels, storage_key
from fold3d.trace import Trace
from fold3d.trace.repeated import Twins
from fold3d.trace.shadow import one_sequence_a_row, shadow_of, without_values


def has_memory(value: object) -> bool:
    """Whether it is a tensor with memory of its own; how large a sparse one is, only its values say."""
    return isinstance(value, Tensor) and value.layout == torch.strided


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution")
"""What sums over a dimension: of two parts it makes a sum over the ranks, which is whole."""
_LOOKUP = "embedding"


class ShardedTensors:
    """What operations make of parts of weights: a product of a whole tensor with a part is a part, and of two parts a
    sum, which TP.sync makes whole. What is computed of a part is a part.

    Where ranks share the sequence, blocks have parts of what is whole otherwise; whole are the inputs of products with
    parts, which are gathered for them.
    """

    def __init__(self, model: Module, sharding: ShardingPlan | None) -> None:
        """Args:
        model: the one that runs, whole.
        sharding: None: every tensor is whole.
        """
        self._tp = 1 if sharding is None else sharding.tp
        self._shares_sequence = sharding is not None and bool(sharding.sequence)
        self._weights = StorageLabels[int]()  # the dimension along which it is spread
        self._parts = StorageLabels[bool]()  # whether it is a part
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shard = None if sharding is None else sharding.shard_of(name)
            if shard is not None and all(shard.length(rank) < shard.size for rank in range(shard.ranks)):
                self._weights[parameter] = shard.dim

    def bytes_of(self, name: str, operands: Sequence[Tensor], made: Tensor, in_block: bool) -> int:
        """Returns how many bytes of a new memory a rank has.

        Args:
            name: of the operation that made it.
            operands: its tensors.
            made: its result, whole.
            in_block: whether a block is under way, or its backward.
        """
        size = made.untyped_storage().nbytes()
        if self._tp == 1:
            return size
        dims = [self._weights.get(tensor) for tensor in operands]
        spread = [dim for dim in dims if dim is not None]
        if spread and len(spread) == len(dims):  # of another dtype, say
            self._weights[made] = spread[0]
            return size // self._tp
        is_part = any(map(self._parts.get, operands))
        if name == _LOOKUP and spread:
            is_part = spread[0] != 0  # else the ranks' entries are summed
        elif spread:
            is_part = not (is_part and name in _PRODUCTS)
        self._parts[made] = is_part
        return size // self._tp if is_part or (in_block and self._shares_sequence) else size

    def gathered(self, name: str, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns which tensors ranks gather for this operation, where they share the sequence."""
        if not self._shares_sequence or name not in _PRODUCTS:
            return []
        others = [tensor for tensor in operands if self._weights.get(tensor) is None]
        return [one for one in others if not self._parts.get(one)] if len(others) < len(operands) else []


def layer_bytes(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    device: torch.device | str = "cpu",
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    sharding: ShardingPlan | None = None,
) -> tuple[LayerBytes, ...]:
    """Returns what the prologue, each block and the epilogue need, for one micro-batch; no process group is used.

    Neither the model nor random numbers are touched.

    Args:
        model: whole; parameters of any device.
        trace: its recording.
        micro_batch: keyword arguments of the model's forward; values matter where the model decides by them.
        device: whose kernels are chosen; of a kind that this torch knows.
        autocast: the context in which the forward runs.
        prepare: called with the copy that runs; may wrap parts of it.
        sharding: how a tensor-parallel group has shared its weights out: what a rank of it needs; None: there is none.
    Raises: whatever the forward raises on tensors without values.
    """
    with shadow_of(model, device) as shadow:
        arguments = shadow.arguments(micro_batch)
        for parameter in shadow.model.parameters():
            if parameter.requires_grad:
                parameter.grad = without_values(parameter, shadow.mode, parameter.device)
        prepare(shadow.model)
        twins = Twins(shadow.model, trace, micro_batch)
        counted = _Counted(len(trace.blocks) + 2, ShardedTensors(shadow.model, sharding))
        for block in trace.modules:
            module = shadow.model.get_submodule(block)
            module.register_forward_pre_hook(counted.before, with_kwargs=True)
            module.register_forward_hook(counted.after)
        with one_sequence_a_row(micro_batch), shadow.running(checkpoints=True), counted:
            with torch.enable_grad(), autocast():
                roots = _roots(shadow.call(arguments))
            counted.turn()
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return counted.result(twins.of)


def _roots(returned: Any) -> list[Tensor]:
    """Returns the loss, if there is one, else all that a backward can begin with."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    leaves = tree_leaves(returned if loss is None else loss)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@dataclass(slots=True)
class _Memory:
    """Memory that an operation has made."""

    layer: int
    bytes: int
    is_handed_on: bool = False
    """Whether its layer hands it on."""

    def grow(self, size: int) -> int:
        """It takes at least so many bytes; returns how many are new."""
        before, self.bytes = self.bytes, max(self.bytes, size)
        return self.bytes - before

    def hand_on(self, layer: int) -> None:
        """This layer hands it on."""
        self.is_handed_on |= layer == self.layer


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations make, by the layer that is under way."""

    def __init__(self, layers: int, parts: ShardedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts = parts
        self._live = 0
        self._made = StorageLabels[_Memory]()
        self._layer, self._backward = 0, False
        self._start = [0] * layers  # bytes when its forward begins
        self._forward, self._back = [0] * layers, [0] * layers  # most while it is under way
        self._kept: list[_Memory] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        tensors = [value for value in tree_leaves((args, kwargs)) if has_memory(value)]
        name = func.overloadpacket.__name__
        for tensor in self._parts.gathered(name, tensors):
            self._whole(tensor)
        for leaf in filter(has_memory, tree_leaves(result)):
            if self._made.get(leaf) is not None:
                continue
            if given is None:
                given = set(map(storage_key, tensors))
            if storage_key(leaf) in given:  # changed in place, or a view, of what was there before
                continue
            in_block = 0 < self._layer < len(self._start) - 1
            made = self._made[leaf] = _Memory(self._layer, self._parts.bytes_of(name, tensors, leaf, in_block))
            self._live += made.bytes
            weakref.finalize(leaf.untyped_storage(), self._freed, made)
        self._note()
        return result

    def _whole(self, tensor: Tensor) -> None:
        """All of a tensor's memory is there."""
        made = self._made.get(tensor)
        if made is not None:
            self._live += made.grow(tensor.untyped_storage().nbytes())

    def _freed(self, made: _Memory) -> None:
        self._live -= made.bytes

    def _note(self) -> None:
        most = self._back if self._backward else self._forward
        most[self._layer] = max(most[self._layer], self._live)

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook for when a block begins."""
        if not self._backward and not self._layer:  # else it is computed again, or no first one
            self._returns_to(0, (args, kwargs))
            self._enter(1)

    def after(self, _: nn.Module, args: Any, result: Any) -> None:
        """A hook for when it ends; what comes until the next one begins is that one's."""
        if not self._backward:
            self._returns_to(self._layer, result)
            self._enter(self._layer + 1)

    def _enter(self, layer: int) -> None:
        self._layer = layer
        self._start[layer] = self._live
        self._note()

    def _returns_to(self, layer: int, handed_on: Any) -> None:
        """Backward comes to the layer with the gradient of what it hands on."""
        for leaf in tree_leaves(handed_on):
            if has_memory(leaf):
                made = self._made.get(leaf)
                if made is not None:
                    made.hand_on(layer)
                if leaf.requires_grad:
                    leaf.register_hook(lambda _, layer=layer: self._turn_to(layer))

    def _turn_to(self, layer: int) -> None:
        self._layer = layer
        self._note()

    def turn(self) -> None:
        """The forward is over, and nothing is held but what the backward needs."""
        self._kept = [replace(one) for one in self._made.values()]
        self._backward = True
        self._note()

    def result(self, twins: Mapping[int, int]) -> tuple[LayerBytes, ...]:
        """Returns what was counted.

        Args:
            twins: block -> the one whose bytes are its own: for it a stand-in ran.
        """
        layers, before = [], 0
        for number in range(len(self._start)):
            kept = [one for one in self._kept if one.layer == number]
            saved = sum(one.bytes for one in kept)
            outputs = sum(one.bytes for one in kept if one.is_handed_on)
            layers.append(
                LayerBytes(
                    saved=saved,
                    outputs=outputs,
                    forward=max(saved, self._forward[number] - self._start[number]),
                    backward=max(saved, self._back[number] - before),
                )
            )
            before += saved
        return tuple(layers[twins.get(number - 1, number - 1) + 1] for number in range(len(layers)))


def inside_of(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    recompute: Recompute,
    forward: Sequence[float],
    device: torch.device | str = "cpu",
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[Inside, ...]:
    """Returns an entry for each set of patterns in `recompute`. Bytes are counted; of a block's time modules take the
    share that their weights are of all its weights: matrix products are nearly all of the work.

    Args:
        forward: seconds per layer.
        model, trace, micro_batch, device, autocast, prepare: as `layer_bytes`.
    """
    found = []
    for choice in dict.fromkeys(choice for choice in recompute.choices if choice.patterns):
        shares = [0.0, *(_share(model.get_submodule(block), choice) for block in trace.blocks), 0.0]

        def both(copied: nn.Module, choice: Choice = choice) -> None:
            prepare(copied)
            _checkpoint(copied, blocks=trace.modules, choice=choice)

        layers = layer_bytes(model, trace, micro_batch, device, autocast=autocast, prepare=both)
        seconds = tuple(share * time for share, time in zip(shares, forward, strict=True))
        found.append(Inside(patterns=choice.patterns, layers=layers, seconds=seconds))
    return tuple(found)


def _share(block: nn.Module, choice: Choice) -> float:
    size = sum(parameter.numel() for parameter in block.parameters())
    return sum(p.numel() for module in modules_of(block, choice) for p in module.parameters()) / size if size else 0.0


def _checkpoint(model: nn.Module, *, blocks: Sequence[str], choice: Choice) -> None:
    for block in map(model.get_submodule, blocks):
        for module in modules_of(block, choice):
            compute_again(module)


def modules_of(block: nn.Module, choice: Choice) -> list[nn.Module]:
    """Returns the modules inside of a block that compute again."""
    return [block.get_submodule(name) for name in choice.modules(modules_inside(block))]


def compute_again(module: nn.Module) -> None:
    """Has a module of a copy without values compute again, in a backward, what that needs."""
    again: Any = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
    module.forward = again
