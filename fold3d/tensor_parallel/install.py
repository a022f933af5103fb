"""install(): puts the forwards of a split on the live modules of a model; classes, names and types stay."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d._C import note_product
from fold3d.errors import ConfigError
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard, indices_of
from fold3d.sharding.split import Attribute, BlockSplit, GroupSplit, InnerResult, Path, TensorSlice
from fold3d.tensor_parallel.block_call import BlockCalls
from fold3d.tensor_parallel.linear import factor, is_fusable, is_linear, matmul, widths, with_bias
from fold3d.tensor_parallel.operators import BlockOperators, OperatorWatch, of_fold3d, without_caches
from fold3d.tensor_parallel.random_draws import DrawsOfShares
from fold3d.tensor_parallel.region import REDUCE, Exchange, RegionOps
from fold3d.tensor_parallel.sequence import BlockSequence, SequenceLength
from fold3d.tensor_parallel.slices import gather_part, paths_of, replace_argument, replace_leaf, take_part
from fold3d.tensor_parallel.weight_reads import Unproved
from fold3d.tensor_parallel.whole_results import LazyWhole, PutTogether, ReturnedParts, put_together
from fold3d.tensor_parallel.whole_sizes import WholeSizes
from fold3d.torch_private import in_backward
from fold3d.trace.coat import Coat, Wrap


class InnerParts:
    """Has a block return whole what it returns beside what later blocks read (`LazyWhole`), and notes the parts that
    modules inside of it return while there are hooks on them: transformers puts them on when attention weights or
    routers' logits are asked for first. What a hook of the user's sees there stays a part."""

    def __init__(self, block: nn.Module, name: str, rank: int, ops: RegionOps, sequence: BlockSequence | None) -> None:
        """Args:
        name: of the block in the model.
        sequence: what the block does with parts of the sequence; None: every rank has all of it.
        """
        self.parts = ReturnedParts()
        self._block, self._name, self._rank, self._ops, self._sequence = block, name, rank, ops, sequence

    def watch(self, coat: Coat, result: InnerResult) -> None:
        """Begins to note what a module returns."""
        module = self._block.get_submodule(result.module)
        ways = dict.fromkeys(result.whole) | self._ways(result)
        unknown = partial(self._fail, f"{self._name}.{result.module}".rstrip("."))
        original, is_block = module.forward, module is self._block

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if in_backward():  # computed again: nobody is handed it
                return output
            if is_block:
                return self._lazily(output, ways, unknown)
            if module._forward_hooks:
                self._note(output, ways, unknown)
            return output

        coat.put(Wrap.PARTS, module, forward)

    def _ways(self, result: InnerResult) -> dict[Path, PutTogether | None]:
        ways: dict[Path, PutTogether | None] = {
            one.path: partial(gather_part, one=one, rank=self._rank, ops=self._ops) for one in result.slices
        }
        if self._sequence is not None:
            ways |= dict.fromkeys(result.rows, self._sequence.whole)
            ways |= dict.fromkeys(result.folded, self._sequence.whole_folded)
        return ways

    def _lazily(self, output: Any, ways: Mapping[Path, PutTogether | None], unknown: PutTogether) -> Any:
        for path, _ in paths_of(output):
            whole = ways.get(path, unknown)
            if whole is not None:
                output = replace_leaf(output, path, partial(LazyWhole.of, put_together=whole))
        return output

    def _note(self, output: Any, ways: Mapping[Path, PutTogether | None], unknown: PutTogether) -> None:
        for path, leaf in paths_of(output):
            whole = ways.get(path, unknown)
            if whole is not None:
                self.parts.note(leaf, whole)

    def _fail(self, module: str, part: Tensor) -> NoReturn:
        shared = self._sequence is not None
        raise ConfigError(
            f"the model returns what '{module}' computed, and with tp={self._ops.size} this rank has a part of it "
            f"({'x'.join(map(str, part.shape))}) of which it is not known how it makes up the whole. Have the "
            "model's configuration ask for it before training begins (output_attentions=True, say), "
            f"{'set sequence_parallel=False, ' if shared else ''}leave the layers whole with "
            "tp_plan={NAME: 'replicate'}, or set tp=1"
        )


def install(
    coat: Coat,
    model: nn.Module,
    plan: ShardingPlan,
    rank: int,
    ops: RegionOps,
    operators: BlockOperators | None = None,
) -> None:
    """Makes the model's blocks compute what `rank` has of them, until the coat is off.

    Parameters may be sliced (`Shard.take`) before or after: their values and shapes are read in each forward. It comes
    before a SplitModel is made, whose forwards then stand around these. The model's own checkpointing, autocast and
    no_grad are as before; a sum over the ranks happens in a forward, and in its recomputation.

    Args:
        rank: place in the tensor-parallel group, 0 .. tp-1.
        ops: the group; its calls are made in the order of the blocks' own code.
        operators: notes what the blocks run; None: nobody asks.
    Raises: AttributeError when the model has other modules than the plan's.
    """
    parts: list[ReturnedParts] = []
    length = SequenceLength(ops.size, rank)
    for name, split in plan.blocks.items():
        block, sequence = model.get_submodule(name), None
        calls = BlockCalls(ops, type(block).__name__)
        parted = plan.sequence.get(name)
        if parted is not None:
            if parted.begins:
                length = SequenceLength(ops.size, rank)
            sequence = BlockSequence(block, parted, length, ops, calls)
        watch = None if operators is None or not split.groups else operators.watch(name, block)
        install_block(coat, block, split, rank, ops, calls, sequence, watch)
        inner = InnerParts(block, name, rank, ops, sequence)
        for one in (split if parted is None else parted).inner:
            inner.watch(coat, one)
        parts.append(inner.parts)
    put_together(coat, model, plan.blocks, parts)


def install_block(
    coat: Coat,
    block: nn.Module,
    split: BlockSplit,
    rank: int,
    ops: RegionOps,
    calls: BlockCalls | None = None,
    sequence: BlockSequence | None = None,
    operators: OperatorWatch | None = None,
) -> None:
    """Does for one block what `install` does for a model.

    Args:
        calls: the block's; None: new ones.
        sequence: what it does with parts of the sequence; None: it is given the whole.
        operators: notes what it runs; None: nobody asks.
    """
    if split.groups:
        made = _Installer(coat, block, split, rank, ops, BlockCalls(ops) if calls is None else calls, sequence)
        made.put_on(operators)


def set_attribute(coat: Coat, block: nn.Module, attribute: Attribute) -> None:
    """Gives an attribute of a block's module the value it has on a rank."""
    module = block.get_submodule(attribute.module)
    name, value = attribute.name, attribute.part
    if name.startswith("config."):
        config: Any = copy.copy(module.config)
        setattr(config, name.removeprefix("config."), value)
        name, value = "config", config
    coat.put(Wrap.PART_ATTRIBUTES, module, {name: value})


def set_attributes(coat: Coat, block: nn.Module, split: BlockSplit, rank: int) -> None:
    """Does that for all of a block, and gives linear modules the numbers of channels they have on a rank, which their
    code or others' reads."""
    for full, shard in split.shards.items():
        holder, _, name = full.rpartition(".")
        module = block.get_submodule(holder)
        if is_linear(module) and name == "weight":
            coat.put(Wrap.PART_ATTRIBUTES, module, {widths(module)[shard.dim]: shard.length(rank)})
    for attribute in split.attributes:
        set_attribute(coat, block, attribute)


class _Installer:
    """Puts the forwards on one block."""

    def __init__(
        self,
        coat: Coat,
        block: nn.Module,
        split: BlockSplit,
        rank: int,
        ops: RegionOps,
        calls: BlockCalls,
        sequence: BlockSequence | None,
    ) -> None:
        self.linear_entries: dict[str, nn.Module] = {}
        """Entries whose products may be computed before they are called."""
        self._coat, self._sequence = coat, sequence
        self._leave = (lambda y: ops.exchange(y, REDUCE)) if sequence is None else sequence.leave
        self._block = block
        self._split = split
        self._rank = rank
        self._ops = ops
        self._calls = calls
        # Where the sequence is shared, every rank has a part of it everywhere in the block.
        has_parts = lambda: sequence is not None or calls.current().in_region  # noqa: E731
        self._draws = DrawsOfShares(block, split.draws, rank) if split.draws else None
        self.unproved = Unproved(block, split.unrun, split.unread, has_parts)
        self._hubs = {
            name: _Hub(shard, rank, ops) for name, shard in split.shards.items() if shard.overlaps and not shard.summed
        }

    def group(self, number: int, group: GroupSplit) -> None:
        """Puts on the forwards of a group."""
        for name, runs in group.copied.items():
            module = self._block.get_submodule(name)
            self._coat.put(Wrap.REGION, module, self._copied(module, indices_of(runs)))
        for name in dict.fromkeys((*group.entries, *group.exits)):
            module = self._block.get_submodule(name)
            enters, exits = name in group.entries, name in group.exits
            if exits and is_linear(module) and "forward" not in vars(module):
                forward: Callable[..., Any] = self._linear_exit(module, number)
            elif not exits and is_linear(module) and "forward" not in vars(module) and not self._hubs_of(name):
                self.linear_entries[name] = module
                forward = self._linear_entry(module, name, number)
            else:
                forward = self._region(module, name, number, enters, exits, group.shared)
            self._coat.put(Wrap.REGION, module, forward)

    def put_on(self, operators: OperatorWatch | None) -> None:
        """Puts everything on the block."""
        coat, sequence = self._coat, self._sequence
        set_attributes(coat, self._block, self._split, self._rank)
        for number, group in enumerate(self._split.groups):
            self.group(number, group)
        self.unproved.watch_modules(coat)
        if sequence is not None:
            for one in sequence.split.gathers:
                sequence.gather(coat, one, self.linear_entries)
            sequence.watch(coat)
        self.block(operators)

    def block(self, operators: OperatorWatch | None) -> None:
        """Puts the block's own forward around the others."""
        split, rank, ops, calls, original = self._split, self._rank, self._ops, self._calls, self._block.forward
        block = self._block
        sequence, unproved = self._sequence, self.unproved
        hidden = None if sequence is None else sequence.split.hidden  # enters regions by what gathers it
        inputs = [one for one in split.inputs if one.path != hidden]
        entering = [path for path in split.entering if path != hidden]
        # Of the call of now: where a checkpoint in the block runs a part of it again, the modes are those of the first.
        in_region = lambda: calls.current().in_region  # noqa: E731

        def forward(*args: Any, **kwargs: Any) -> Any:
            begun = calls.begin()
            call = begun[0]
            sliced: dict[int, tuple[Tensor, Tensor]] = {}

            def take(x: Tensor, one: TensorSlice) -> Tensor:
                part = take_part(call.copy(x), one, rank)
                sliced[id(part)] = (part, x)
                return part

            try:
                if sequence is not None:
                    args, kwargs = sequence.scatter(call, args, kwargs)
                for one in inputs:
                    args, kwargs = replace_argument(args, kwargs, one.path, partial(take, one=one))
                for path in entering:
                    args, kwargs = replace_argument(args, kwargs, path, call.copy)
                with contextlib.ExitStack() as drawing:
                    if split.whole_sizes:
                        drawing.enter_context(WholeSizes(ops.size))
                    if operators is not None:
                        drawing.enter_context(operators.around(args, kwargs))
                        drawing.enter_context(without_caches((args, kwargs)))
                    drawing.enter_context(unproved.watch_parameters())
                    region_draws = self._draws is not None and drawing.enter_context(self._draws.around(in_region))
                    call.draw(forks=not region_draws)
                    if sequence is not None:
                        drawing.enter_context(sequence.random(in_region, args, kwargs, region_draws=region_draws))
                    try:
                        output = original(*args, **kwargs)
                    except (RuntimeError, IndexError, ValueError) as error:
                        if call.in_region and (held := _whole_tensors(block, split, rank)):
                            raise _of_whole(block, held, error) from error
                        raise
                for one in split.outputs:
                    gather = partial(_gather, one=one, rank=rank, ops=ops, sliced=sliced)
                    output = replace_leaf(output, one.path, gather)
                return output if sequence is None else sequence.hand_on(output)
            finally:
                calls.end(begun)

        self._coat.put(Wrap.DIVIDED, self._block, forward)

    def _copied(self, module: nn.Module, channels: Tensor) -> Callable[..., Any]:
        original, ops = module.forward, self._ops

        def forward(*args: Any, **kwargs: Any) -> Any:
            y = original(*args, **kwargs)
            if not y.requires_grad:
                return y
            whole = len(channels) == y.shape[-1]
            return ops.exchange(y, Exchange.copy(-1, None if whole else channels.to(y.device)))

        return forward

    def _linear_exit(self, module: nn.Module, number: int) -> Callable[[Tensor], Tensor]:
        calls, ops, summed, sequence = self._calls, self._ops, self._leave, self._sequence

        @partial(_one_product, module)
        def forward(x: Tensor) -> Tensor:
            fused = ops.fused if is_fusable(module, x) else None
            y = x if fused is not None else matmul(module, x)
            call = calls.current()
            call.leave(number)
            calls.left(call)
            if fused is None:
                y = summed(y)
            elif sequence is None:
                y = fused.matmul_all_reduce(x, factor(module))
            else:
                y = sequence.leave_product(fused, x, factor(module))
            bias: Tensor | None = module.bias  # type: ignore[assignment]
            return y if bias is None else y + bias.to(y.dtype)

        return forward

    def _linear_entry(self, module: nn.Module, name: str, number: int) -> Callable[..., Tensor]:
        calls, ops, split, original = self._calls, self._ops, self._split, module.forward
        # Where the sequence is shared, what is gathered brings its products.
        found = next((names for names in split.together if name in names and self._sequence is None), ())
        linear = self.linear_entries

        @partial(_one_product, module)
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            (x,) = (*args, *kwargs.values())
            call = calls.current()
            product = call.product(x, name)
            if product is None and found and x.requires_grad and torch.is_grad_enabled():
                fused = ops.fused
                modules = [linear[one] for one in found if one in linear]
                if fused is not None and len(modules) == len(found) and all(is_fusable(one, x) for one in modules):
                    made = fused.copy_matmul(x, [factor(one) for one in modules])
                    call.add_products(x, dict(zip(found, made, strict=True)))
                    product = call.product(x, name)
            if product is None:
                return original(call.enter(x, number))  # type: ignore[no-any-return]
            call.open(number, x.device)
            return with_bias(module, product)

        return forward

    def _hubs_of(self, name: str) -> dict[str, _Hub]:
        prefix = f"{name}." if name else ""
        return {full: hub for full, hub in self._hubs.items() if full.startswith(prefix)}

    def _region(
        self, module: nn.Module, name: str, number: int, enters: bool, exits: bool, shared: tuple[str, ...]
    ) -> Callable[..., Any]:
        calls, ops, block, original = self._calls, self._ops, self._block, module.forward
        summed = self._leave
        prefix = f"{name}." if name else ""
        hubs = self._hubs_of(name)
        parts = [full for full in shared if full.startswith(prefix)] if exits else []
        # The bias of a linear layer that somebody has put a forward on is added once, behind the sum.
        late = f"{prefix}bias" if exits and is_linear(module) and module.bias is not None else None

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = calls.current()
            if enters:

                def enter(x: Tensor) -> Tensor:
                    return call.enter(x, number) if x.is_floating_point() else x

                args, kwargs = tree_map_only(Tensor, enter, (args, kwargs))
            with Coat() as coat:
                for full, hub in hubs.items():
                    _hide(coat, block, full, hub.copied)
                for full in parts:
                    _hide(coat, block, full, lambda parameter: parameter / ops.size)
                if late is not None:
                    _hide(coat, block, late, torch.zeros_like)
                y = original(*args, **kwargs)
            if not exits:
                return y
            with of_fold3d():
                call.leave(number)
                calls.left(call)
            y = tree_map_only(Tensor, summed, y)
            return y if late is None else y + block.get_parameter(late).to(y.dtype)

        return forward


def _whole_tensors(block: nn.Module, split: BlockSplit, rank: int) -> dict[str, tuple[str, Shard]]:
    """Returns buffers and other tensors of a block's modules that are as long as the whole of what a rank has a part
    of, by name: a weight that is divided there, and how."""
    shards = {shard.size: (name, shard) for name, shard in split.shards.items() if shard.length(rank) != shard.size}
    found: dict[str, tuple[str, Shard]] = {}
    for path, module in block.named_modules():
        held = {**module._buffers, **{name: one for name, one in vars(module).items() if isinstance(one, Tensor)}}
        for name, one in held.items():
            size = next((size for size in one.shape if size in shards), None) if one is not None else None
            if size is not None:
                found[f"{path}.{name}".lstrip(".")] = shards[size]
    return found


def _of_whole(block: nn.Module, held: Mapping[str, tuple[str, Shard]], error: Exception) -> ConfigError:
    names = ", ".join(repr(name) for name in held)
    weight, shard = next(iter(held.values()))
    return ConfigError(
        f"tp: a {type(block).__name__} fails where each rank computes its share ({error}). Of its tensors {names} a "
        f"rank has all {shard.size} entries, of its weight {weight!r} a part: only parameters are divided. Make it a "
        "parameter (requires_grad=False, where it is not trained), leave the layer whole with tp_plan={NAME: "
        "'replicate'}, or set tp=1"
    )


def _one_product(module: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Has what a linear module's forward runs noted as one product of matrices, however it is made."""

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        with of_fold3d():
            y = forward(*args, **kwargs)
        note_product(y, [*args, *kwargs.values(), module.weight, module.bias])  # type: ignore[list-item]
        return y

    return noted


class _Hub:
    """What several ranks hold of a parameter of which each holds another part: its gradient is summed in backward."""

    def __init__(self, shard: Shard, rank: int, ops: RegionOps) -> None:
        self._ops = ops
        self._dim = shard.dim
        held = [0] * shard.size
        for runs in shard.parts:
            for index in indices_of(runs).tolist():
                held[index] += 1
        common = [index for index, count in enumerate(held) if count > 1]
        place = {index: k for k, index in enumerate(common)}
        mine = indices_of(shard.parts[rank]).tolist()
        self._common = len(common)
        self._everybody = held.count(len(shard.parts)) == len(common)
        self._here = torch.tensor([k for k, index in enumerate(mine) if index in place])
        self._places = torch.tensor([place[index] for index in mine if index in place])

    def copied(self, weight: Tensor) -> Tensor:
        """Returns a rank's part with a gradient that is, at what several hold, the sum of theirs."""
        if not weight.requires_grad or not torch.is_grad_enabled():
            return weight
        here, places = self._here.to(weight.device), self._places.to(weight.device)
        if self._everybody:
            return self._ops.exchange(weight, Exchange.copy(self._dim, here))
        shape = [*weight.shape[: self._dim], self._common, *weight.shape[self._dim + 1 :]]
        common = weight.new_zeros(shape).index_copy(self._dim, places, weight.index_select(self._dim, here))
        everything = torch.arange(self._common, device=weight.device)
        common = self._ops.exchange(common, Exchange.copy(self._dim, everything))
        return weight.index_copy(self._dim, here, common.index_select(self._dim, places))


def _hide(coat: Coat, block: nn.Module, full: str, change: Callable[[Tensor], Tensor]) -> None:
    """Has the block's code read something else in the place of a parameter."""
    holder, _, name = full.rpartition(".")
    module = block.get_submodule(holder)
    parameter = module._parameters.get(name)
    if parameter is not None:
        changed = change(parameter)
        assert name not in vars(module), "no two halves of a micro-batch are here at once"
        coat.put(Wrap.WEIGHT, module, {name: changed})


def _gather(x: Tensor, one: TensorSlice, rank: int, ops: RegionOps, sliced: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    part, whole = sliced.get(id(x), (None, None))
    if part is x and whole is not None:  # what came in goes out again
        return whole
    return gather_part(x, one, rank, ops)
