"""prove(): that ranks which share a block compute what the block computes, and its gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d.sharding.sequence import SequenceSplit
from fold3d.sharding.shard import Shard
from fold3d.sharding.split import BlockSplit
from fold3d.splitting.probing.capture import CapturedCall
from fold3d.splitting.probing.double import DoubleMode
from fold3d.splitting.probing.probe import replace_parameter
from fold3d.splitting.probing.without_draws import WithoutDraws
from fold3d.splitting.proving.emulate import EmulatedGroup, EmulatedOps
from fold3d.splitting.proving.factors import Factors
from fold3d.tensor_parallel.block_call import BlockCalls
from fold3d.tensor_parallel.install import install_block
from fold3d.tensor_parallel.sequence.block_sequence import BlockSequence
from fold3d.tensor_parallel.sequence.length import SequenceLength
from fold3d.tensor_parallel.slices import paths_of
from fold3d.tensor_parallel.weight_reads import Reads

TOLERANCE = 1e-10
"""Of differences, relative to the largest element, in double precision."""


def prove(call: CapturedCall, split: BlockSplit, tp: int, training: bool = False, used: Used | None = None) -> str:
    """Returns an empty text, or where ranks that share the block differ from it.

    All ranks run on this process (`EmulatedGroup`), in double precision, with random weights, large ones of low rank
    (`Factors`); results, and the gradients of every parameter and every argument, are compared with the whole block's.

    Args:
        training: run it as in training, but for what it draws, and compare what becomes of its buffers, too.
        used: what of the block is used is added to it.
    """
    proof = _Proof(call, split, tp, training)
    wrong = proof.run()
    if used is not None:
        used.modules.update(proof.used.modules)
        used.parameters.update(proof.used.parameters)
    return wrong


@dataclass(slots=True)
class Used:
    """What of a block was used in some runs."""

    modules: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def put_into(self, split: BlockSplit, block: nn.Module) -> BlockSplit:
        """Returns the split, which knows what of the block was not used when it was proved."""
        if not split.groups:
            return split
        unread = [name for name, _ in block.named_parameters() if name not in self.parameters]
        holders = {name: name.rpartition(".")[0] for name in unread}
        unrun = tuple(dict.fromkeys(one for one in holders.values() if one not in self.modules))
        return replace(split, unrun=unrun, unread=tuple(name for name in unread if holders[name] not in unrun))


def prove_sequence(
    call: CapturedCall, split: BlockSplit, tp: int, sequence: SequenceSplit, training: bool = False
) -> tuple[str, set[str]]:
    """Does what `prove` does for ranks that share the block's sequence, too, and returns besides which parameters that
    every rank holds whole have gradients that are to be summed over the ranks, of which the split does not say so.

    Args:
        sequence: of a block that is given the whole sequence and returns it.
    """
    proof = _Proof(call, split, tp, training, sequence)
    return proof.run(), proof.summed


class _Proof:
    def __init__(
        self, call: CapturedCall, split: BlockSplit, tp: int, training: bool, sequence: SequenceSplit | None = None
    ) -> None:
        self._call, self._split, self._tp, self._training, self._sequence = call, split, tp, training, sequence
        self._before: dict[str, Tensor] = {}
        self.summed: set[str] = set()
        self.used = Used()
        self._args, self._kwargs = double_inputs(call)
        self._factors = Factors()
        self._large = Factors.candidates(call.block, split.shards)

    def run(self) -> str:
        whole, inputs, output = self._run_whole()
        unused = set(self._large) - self._factors.used
        if unused:  # what is no matrix product's needs values
            self._factors = Factors()
            self._large = [name for name in self._large if name not in unused]
            whole, inputs, output = self._run_whole()
        draw = torch.Generator().manual_seed(7)
        weights = {
            path: torch.randn(leaf.shape, dtype=leaf.dtype, generator=draw)
            for path, leaf in paths_of(output)
            if path in self._call.read and leaf.is_floating_point()
        }
        with self._mode():
            _loss(output, weights).backward()  # type: ignore[no-untyped-call]
        blocks = [shard_block(whole, self._split, rank, self._large) for rank in range(self._tp)]
        for block in blocks:
            _set_buffers(block, self._before)
        ranks = [_Leaves(self._args, self._kwargs) for _ in range(self._tp)]

        def as_rank(ops: EmulatedOps) -> Any:
            install_as_rank(blocks[ops.rank], self._split, ops, self._sequence)
            return blocks[ops.rank](*ranks[ops.rank].args, **ranks[ops.rank].kwargs)

        owned = [(rank, name, block.get_parameter(name)) for rank, block in enumerate(blocks) for name in self._large]
        try:
            with self._mode(), self._factors.modes(owned, self._split.shards):
                outputs = EmulatedGroup(self._tp).run(as_rank)
            with self._mode():
                torch.stack([_loss(out, weights) for out in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            return f"{self._tp} ranks raise {type(error).__name__}: {error}"
        return next(self._wrong(output, outputs, weights, inputs, ranks, whole, blocks), "")

    def _run_whole(self) -> tuple[nn.Module, _Leaves, Any]:
        whole = with_weights(self._call.block, self._large).train(self._training)
        self._before = {name: buffer.clone() for name, buffer in whole.named_buffers()}
        inputs = _Leaves(self._args, self._kwargs)
        large = [(name, whole.get_parameter(name)) for name in self._large]
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: self.used.modules.add(name))
            for name, module in whole.named_modules()
        ]
        with self._mode(), self._factors.mode(-1, large, {}), Reads(whole) as reads:
            output = whole(*inputs.args, **inputs.kwargs)
        for hook in hooks:
            hook.remove()
        self.used.parameters.update(reads.parameters)
        return whole, inputs, output

    def _mode(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(DoubleMode())
        if self._training:
            stack.enter_context(WithoutDraws())
        return stack

    def _wrong(
        self,
        output: Any,
        outputs: list[Any],
        weights: Mapping[Any, Tensor],
        inputs: _Leaves,
        ranks: list[_Leaves],
        whole: nn.Module,
        blocks: list[nn.Module],
    ) -> Iterator[str]:
        expected = dict(paths_of(output))
        for rank in range(self._tp):
            returned = dict(paths_of(outputs[rank]))
            for path in weights:
                if path not in returned or differ(returned[path], expected[path]):
                    yield f"rank {rank} returns something else"
            for path, leaf in inputs.tensors.items():
                if differ(ranks[rank].tensors[path].grad, leaf.grad):
                    yield f"rank {rank} has another gradient of argument {'.'.join(map(str, path))}"
        for name, parameter in whole.named_parameters():
            shard = self._split.shards.get(name)
            if name in self._large:
                continue
            gradients = [block.get_parameter(name).grad for block in blocks]
            if self._sequence is not None and shard is None and _is_only_the_sum(gradients, parameter.grad):
                self.summed.add(name)
                continue
            for rank in range(self._tp):
                part = parameter.grad if shard is None or parameter.grad is None else shard.take(parameter.grad, rank)
                if differ(_whole_gradient(gradients, shard, rank), part):
                    yield f"rank {rank} has another gradient of {name}"
        for name, buffer in whole.named_buffers():
            for rank, block in enumerate(blocks):
                found = dict(block.named_buffers()).get(name)
                if found is None or differ(found.double(), buffer.double()):
                    yield f"rank {rank} makes another {name}"
        for rank, name, gradient, part in self._factors.differences(self._split.shards, self._tp):
            if differ(gradient, part):
                yield f"rank {rank} has another gradient of {name}"


def double_inputs(call: CapturedCall) -> tuple[Any, Any]:
    """Returns a call's arguments, positional and by name, in double precision."""
    args, kwargs = tree_map_only(Tensor, _double, (call.args, call.kwargs))
    return args, kwargs


def shard_block(block: nn.Module, split: BlockSplit, rank: int, large: list[str]) -> nn.Module:
    """Returns a copy of a block with a rank's parts of its parameters; large ones take no memory."""
    memo: dict[int, Any] = {}
    for name in large:
        parameter = block.get_parameter(name)
        shard = split.shards.get(name)
        shape = parameter.shape if shard is None else shard.shape(parameter.shape, rank)
        memo[id(parameter)] = _blank(shape)
    made = copy.deepcopy(block, memo)
    for name, parameter in made.named_parameters():
        parameter.grad = None
        shard = split.shards.get(name)
        if shard is not None and name not in large:
            parameter.data = shard.take(parameter.data, rank)
    return made


def install_as_rank(
    block: nn.Module, split: BlockSplit, ops: EmulatedOps, sequence: SequenceSplit | None = None
) -> None:
    """Puts the forwards of a split on an emulated rank's block, which shares its sequence, too, if that is given."""
    calls, parted = BlockCalls(ops), None
    if sequence is not None:
        parted = BlockSequence(block, sequence, SequenceLength(ops.size, ops.rank), ops, calls)
    install_block(block, split, ops.rank, ops, calls, parted)


def _set_buffers(block: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        holder, _, key = name.rpartition(".")
        block.get_submodule(holder)._buffers[key] = value.clone()


def _whole_gradient(gradients: list[Tensor | None], shard: Shard | None, rank: int) -> Tensor | None:
    if shard is None or not shard.summed:
        return gradients[rank]
    parts = [gradients[other] for other in shard.holders(rank)]
    held = [part for part in parts if part is not None]
    return torch.stack(held).sum(0) if held else None


def _is_only_the_sum(gradients: list[Tensor | None], whole: Tensor | None) -> bool:
    held = [gradient for gradient in gradients if gradient is not None]
    if not held or not any(differ(gradient, whole) for gradient in gradients):
        return False
    return not differ(torch.stack(held).sum(0), whole)


def differ(found: Tensor | None, expected: Tensor | None) -> bool:
    """Returns whether tensors differ by more than rounding in double precision."""
    if found is None or expected is None:
        none = found if expected is None else expected
        return none is not None and bool(none.any())
    if found.shape != expected.shape or bool(torch.isnan(found).any()):
        return True
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    return bool(((found - expected).abs() > TOLERANCE * scale).any())


def with_weights(block: nn.Module, large: list[str]) -> nn.Module:
    """Returns a copy of a block on the meta device with random weights in double precision, but for large ones."""
    made = copy.deepcopy(block)
    for name, parameter in list(made.named_parameters()):
        replace_parameter(made, name, _blank(parameter.shape) if name in large else _random(name, parameter))
    for module in made.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = _double(buffer)
    return made


def _random(name: str, like: Tensor) -> nn.Parameter:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    value = torch.randn(like.shape, dtype=torch.float64, generator=draw)
    return nn.Parameter(value / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.3 * value + 1)


def _blank(shape: Iterable[int]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(*shape))


class _Leaves:
    """Arguments whose tensors have gradients."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        def leaf(x: Tensor) -> Tensor:
            return x.detach().clone().requires_grad_(x.is_floating_point())

        self.args, self.kwargs = tree_map_only(Tensor, leaf, (args, kwargs))
        self.tensors = {path[1:]: x for path, x in paths_of((self.args, self.kwargs)) if x.requires_grad}


def _loss(output: Any, weights: Mapping[Any, Tensor]) -> Tensor:
    terms = [(leaf * weights[path]).sum() for path, leaf in paths_of(output) if path in weights]
    return torch.stack(terms).sum()


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
