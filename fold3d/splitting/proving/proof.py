"""prove(): that ranks which share a block compute what the block computes, and its gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d.sharding.shard import Shard
from fold3d.sharding.split import BlockSplit
from fold3d.splitting.probing.capture import CapturedCall, paths_of
from fold3d.splitting.probing.double import DoubleMode
from fold3d.splitting.proving.emulate import EmulatedGroup, EmulatedOps
from fold3d.tensor_parallel.install import install_block

TOLERANCE = 1e-10
"""Of differences, relative to the largest element, in double precision."""


def prove(call: CapturedCall, split: BlockSplit, tp: int) -> str:
    """Returns an empty text, or where ranks that share the block differ from it.

    All ranks run on this process (`EmulatedGroup`), with random weights in double precision; results, and the
    gradients of every parameter and every argument, are compared with the whole block's.
    """
    whole = _with_weights(call.block)
    args, kwargs = tree_map_only(Tensor, _double, (call.args, call.kwargs))
    draw = torch.Generator().manual_seed(7)
    inputs = _leaves(args, kwargs)
    with DoubleMode():
        output = whole(*inputs.args, **inputs.kwargs)
    weights = {
        path: torch.randn(leaf.shape, dtype=leaf.dtype, generator=draw)
        for path, leaf in paths_of(output)
        if path in call.read and leaf.is_floating_point()
    }
    _loss(output, weights).backward()  # type: ignore[no-untyped-call]
    blocks = [shard_block(whole, split, rank) for rank in range(tp)]
    ranks = [_leaves(args, kwargs) for _ in range(tp)]

    def as_rank(ops: EmulatedOps) -> Any:
        install_block(blocks[ops.rank], split, ops.rank, ops)
        return blocks[ops.rank](*ranks[ops.rank].args, **ranks[ops.rank].kwargs)

    try:
        with DoubleMode():
            outputs = EmulatedGroup(tp).run(as_rank)
        torch.stack([_loss(out, weights) for out in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"as {tp} ranks it raises {type(error).__name__}: {error}"
    expected = dict(paths_of(output))
    for rank in range(tp):
        found = dict(paths_of(outputs[rank]))
        for path in weights:
            if path not in found or _differ(found[path], expected[path]):
                return f"rank {rank} returns something else"
        for path, leaf in inputs.tensors.items():
            if _differ(ranks[rank].tensors[path].grad, leaf.grad):
                return f"rank {rank} has another gradient of argument {'.'.join(map(str, path))}"
    return _compare_parameters(whole, blocks, split)


def shard_block(block: nn.Module, split: BlockSplit, rank: int) -> nn.Module:
    """Returns a copy of a block with a rank's parts of its parameters."""
    made = copy.deepcopy(block)
    for name, parameter in made.named_parameters():
        parameter.grad = None
        shard = split.shards.get(name)
        if shard is not None:
            parameter.data = shard.take(parameter.data, rank)
    return made


def _compare_parameters(whole: nn.Module, blocks: list[nn.Module], split: BlockSplit) -> str:
    for name, parameter in whole.named_parameters():
        shard = split.shards.get(name)
        gradients = [block.get_parameter(name).grad for block in blocks]
        for rank in range(len(blocks)):
            if parameter.grad is None:
                wrong = gradients[rank] is not None and bool(gradients[rank].any())  # type: ignore[union-attr]
            else:
                expected = parameter.grad if shard is None else shard.take(parameter.grad, rank)
                wrong = _differ(_whole_gradient(gradients, shard, rank), expected)
            if wrong:
                return f"rank {rank} has another gradient of {name}"
    return ""


def _whole_gradient(gradients: list[Tensor | None], shard: Shard | None, rank: int) -> Tensor | None:
    if shard is None or not shard.summed:
        return gradients[rank]
    parts = [gradients[other] for other in shard.holders(rank)]
    return sum((part for part in parts if part is not None), torch.zeros(()))


def _differ(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        none = found if expected is None else expected
        return none is not None and bool(none.any())
    if found.shape != expected.shape or bool(torch.isnan(found).any()):
        return True
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    return bool(((found - expected).abs() > TOLERANCE * scale).any())


def _with_weights(block: nn.Module) -> nn.Module:
    """Returns a copy of a block on the meta device with random weights in double precision."""
    made = copy.deepcopy(block)
    for name, parameter in list(made.named_parameters()):
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        value = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
        value = value / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3 * value + 1
        holder, _, attribute = name.rpartition(".")
        setattr(made.get_submodule(holder), attribute, nn.Parameter(value))
    for module in made.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = _double(buffer)
    return made


class _leaves:
    """Arguments whose tensors have gradients."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        def leaf(x: Tensor) -> Tensor:
            return x.detach().clone().requires_grad_(x.is_floating_point())

        self.args, self.kwargs = tree_map_only(Tensor, leaf, (args, kwargs))
        self.tensors = {path[1:]: x for path, x in paths_of((self.args, self.kwargs)) if x.requires_grad}


def _loss(output: Any, weights: dict[Any, Tensor]) -> Tensor:
    terms = [(leaf * weights[path]).sum() for path, leaf in paths_of(output) if path in weights]
    return torch.stack(terms).sum()


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
