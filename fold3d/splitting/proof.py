"""prove(): that ranks which share a block compute what the block computes, and its gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d._C import NumberSet
from fold3d.sharding.shard import Shard
from fold3d.sharding.split import BlockSplit, SequenceSplit
from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.emulate import EmulatedGroup, EmulatedOps
from fold3d.splitting.probe import replace_parameter
from fold3d.splitting.sites import Site, SiteMode
from fold3d.splitting.torch_modes import DoubleMode, WithoutDraws
from fold3d.tensor_parallel.block_call import BlockCalls
from fold3d.tensor_parallel.install import install_block
from fold3d.tensor_parallel.operators import Operators, OperatorWatch
from fold3d.tensor_parallel.random_draws import PartialDraws
from fold3d.tensor_parallel.sequence import BlockSequence, SequenceLength
from fold3d.tensor_parallel.slices import paths_of
from fold3d.tensor_parallel.weight_reads import Reads
from fold3d.torch_private import StorageLabels
from fold3d.trace.coat import Coat

_Difference = tuple[int, str, Tensor | None, Tensor | None]
RANK = 8
_LARGE = 1 << 20
"""Elements of a weight that has factors."""


@dataclass(slots=True)
class _Pair:
    """A weight as `outputs` times the transposed `inputs`; both [channels, RANK]."""

    outputs: Tensor
    inputs: Tensor
    site: Site


class Factors:
    """Computes matrix products with large weights from two thin ones.

    What is to be proved is which channels a rank has, what is summed, and what happens between products: none of it
    depends on the rank of a weight. A part of a weight's output channels is a part of one factor, a part of its input
    channels one of the other; their gradients are compared in the place of the weight's. All experts have the same.
    """

    def __init__(self, scale: float = 1.0) -> None:
        """Args:
        scale: by which weights are larger.
        """
        self._scale = scale
        self._pairs: dict[tuple[int, str], _Pair] = {}
        self._sizes: dict[str, Site] = {}

    @staticmethod
    def candidates(block: nn.Module, shards: Mapping[str, Shard]) -> list[str]:
        """Returns the weights of a block that are large enough; those of which ranks hold overlapping parts stay."""
        return [
            name
            for name, parameter in block.named_parameters()
            if parameter.dim() > 1 and parameter.numel() > _LARGE and not (name in shards and shards[name].overlaps)
        ]

    @property
    def used(self) -> set[str]:
        """Weights of which products have been made."""
        return {name for _, name in self._pairs}

    def mode(self, owner: int, parameters: Iterable[tuple[str, nn.Parameter]], shards: Mapping[str, Shard]) -> SiteMode:
        """Returns a mode in which products with these parameters are made from factors.

        Args:
            owner: -1 is the whole block, else the rank that has these parameters.
        """
        return self.modes([(owner, name, parameter) for name, parameter in parameters], shards)

    def modes(self, owned: Iterable[tuple[int, str, nn.Parameter]], shards: Mapping[str, Shard]) -> SiteMode:
        """The same for parameters of several owners, given as (owner, name, parameter)."""
        return SiteMode(
            [(f"{owner}/{name}", parameter) for owner, name, parameter in owned],
            lambda site, x, shape: self._product(site, x, shape, shards),
        )

    def differences(self, shards: Mapping[str, Shard], ranks: int) -> Iterator[_Difference]:
        """Yields (rank, weight, found, expected) for each gradient of a factor."""
        for name in sorted(self.used):
            whole = self._pairs[-1, name]
            pairs = [self._pairs[rank, name] for rank in range(ranks)]
            shard = shards.get(name)
            by_outputs = shard is not None and shard.dim == whole.site.out_dim
            for is_outputs in (True, False):
                expected = (whole.outputs if is_outputs else whole.inputs).grad
                found = [(pair.outputs if is_outputs else pair.inputs).grad for pair in pairs]
                for rank in range(ranks):
                    if shard is None:
                        yield rank, name, found[rank], expected
                    elif by_outputs == is_outputs:
                        # Ranks that hold the same channels may have shares of their gradient.
                        others = shard.holders(rank) if shard.summed else (rank,)
                        part = None if expected is None else Shard(0, shard.size, shard.parts).take(expected, rank)
                        yield rank, name, _sum(found[other] for other in others), part
                    else:
                        yield rank, name, _sum(found), expected

    def _product(self, site: Site, x: Tensor, shape: list[int], shards: Mapping[str, Shard]) -> Tensor:
        owner, _, name = site.weight.partition("/")
        key = (int(owner), name)
        if key not in self._pairs:
            self._pairs[key] = self._pair(int(owner), name, site, shards)
        pair = self._pairs[key]
        return torch.matmul(torch.matmul(x, pair.inputs), pair.outputs.T).expand(shape)

    def _pair(self, owner: int, name: str, site: Site, shards: Mapping[str, Shard]) -> _Pair:
        if owner < 0:
            draw = torch.Generator().manual_seed(sum(map(ord, name)))
            outputs = torch.randn(site.outputs, RANK, dtype=torch.float64, generator=draw) / RANK**0.5
            outputs = outputs * _uneven(site.outputs, self._scale)[:, None]
            inputs = torch.randn(site.inputs, RANK, dtype=torch.float64, generator=draw) / site.inputs**0.5
            return _Pair(outputs.requires_grad_(), inputs.requires_grad_(), site)
        whole, shard = self._pairs[-1, name], shards.get(name)
        outputs, inputs = whole.outputs.detach(), whole.inputs.detach()
        if shard is not None:
            rows = Shard(0, shard.size, shard.parts)
            if shard.dim == whole.site.out_dim:
                outputs = rows.take(outputs, owner)
            else:
                inputs = rows.take(inputs, owner)
        return _Pair(outputs.clone().requires_grad_(), inputs.clone().requires_grad_(), site)


def _sum(found: Iterable[Tensor | None]) -> Tensor | None:
    parts = [part for part in found if part is not None]
    return torch.stack(parts).sum(0) if parts else None


TOLERANCE = 1e-10
"""Of differences, relative to the largest element, in double precision."""
_LARGER = 6.0
"""By which weights are larger in a second proof, in the middle: of some channels by 1, of others by its square."""
_ROUGH = 1e-6
"""The tolerance there: large numbers that cancel leave larger errors, and a part that decides otherwise than the whole
is far away."""
_NOISE = 1e-12
"""What is left of numbers that cancel, relative to the largest."""
_MASKED = 1e9
"""Larger numbers mask others."""
_EACH = frozenset(
    (
        *("gt", "lt", "ge", "le", "eq", "ne", "isinf", "isnan", "isfinite", "sign", "sgn", "signbit", "heaviside"),
        *("logical_and", "logical_not", "logical_or", "logical_xor", "nan_to_num", "copysign", "round", "floor"),
        *("ceil", "trunc", "frac", "floor_divide", "fmod", "remainder", "clamp", "clamp_min", "clamp_max", "minimum"),
        *("maximum", "fmin", "fmax", "relu", "hardtanh", "hardsigmoid", "hardswish", "threshold", "softshrink"),
        *("hardshrink", "bucketize", "searchsorted"),
    )
)
"""Operators that decide number by number, or have the same result for a range of them."""
_OF_MANY = frozenset(
    (
        *("any", "all", "is_nonzero", "item", "_local_scalar_dense", "renorm", "sort", "topk", "kthvalue", "median"),
        *("nanmedian", "quantile", "mode", "max", "min", "amax", "amin", "aminmax", "cummax", "cummin", "argmax"),
        *("argmin", "argsort", "nonzero", "histc", "bincount", "nansum", "count_nonzero"),
    )
)
"""Operators that decide by many numbers, along a dimension or all."""
_COUNTING = frozenset(("sum", "mean", "prod", "cumsum"))
"""Likewise of what has been decided."""


def prove(call: CapturedCall, split: BlockSplit, tp: int, training: bool = False, used: Used | None = None) -> str:
    """Returns an empty text, or where ranks that share the block differ from it.

    All ranks run on this process (`EmulatedGroup`), in double precision, with random weights, large ones of low rank
    (`Factors`); results, and the gradients of every parameter and every argument, are compared with the whole block's.
    A block that decides by values is compared once more, with larger and uneven weights: by what ranks decide must be
    what the whole block decides by, or another part of it on each.

    Args:
        training: run it as in training, but for what it draws, and compare what becomes of its buffers, too.
        used: what of the block is used is added to it.
    """
    return _prove(call, split, tp, None, training, used)[0]


@dataclass(slots=True)
class Used:
    """What of a block was used in some runs."""

    modules: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    operators: Operators = field(default_factory=dict)
    """What the ranks ran."""

    def add(self, other: Used) -> None:
        """What `other` says was used, too."""
        self.modules |= other.modules
        self.parameters |= other.parameters
        self.operators |= other.operators

    def put_into(self, split: BlockSplit, block: nn.Module) -> BlockSplit:
        """Returns the split, which knows what of the block was not used when it was proved."""
        if not split.groups:
            return split
        unread = [name for name, _ in block.named_parameters() if name not in self.parameters]
        holders = {name: name.rpartition(".")[0] for name in unread}
        unrun = tuple(dict.fromkeys(one for one in holders.values() if one not in self.modules))
        unread = [name for name in unread if holders[name] not in unrun]
        return replace(split, unrun=unrun, unread=tuple(unread), operators=tuple(sorted(self.operators)))


def prove_sequence(
    call: CapturedCall,
    split: BlockSplit,
    tp: int,
    sequence: SequenceSplit,
    training: bool = False,
    used: Used | None = None,
) -> tuple[str, set[str]]:
    """Does what `prove` does for ranks that share the block's sequence, too, and returns besides which parameters that
    every rank holds whole have gradients that are to be summed over the ranks, of which the split does not say so.

    Args:
        sequence: of a block that is given the whole sequence and returns it.
        used: what of the block is used is added to it.
    """
    return _prove(call, split, tp, sequence, training, used)


def _prove(
    call: CapturedCall, split: BlockSplit, tp: int, sequence: SequenceSplit | None, training: bool, used: Used | None
) -> tuple[str, set[str]]:
    proof = _Proof(call, split, tp, training, sequence)
    wrong = proof.run()
    if used is not None:
        used.add(proof.used)
    if proof.of_whole and not wrong:
        wrong = _Proof(call, split, tp, training, sequence, scale=_LARGER).run()
    return wrong, proof.summed


@dataclass(frozen=True, slots=True)
class _Given:
    """What a deciding operator was given."""

    tensor: Tensor
    dims: tuple[int, ...] | None
    """The dimensions along which it looks at many numbers; None: all."""


class _Decisions(TorchDispatchMode):
    """By what a run decides, of one rank or the whole: what deciding operators are given, and all that make something
    else than floating point of it. By NaN nobody sees what their results depend on; and a limit that the numbers of a
    proof do not reach is one that they do not show."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given: dict[str, list[_Given]] = {}
        self._decided = StorageLabels[bool]()  # made of nothing else than decisions

    def __bool__(self) -> bool:
        return bool(self._given)

    def watch(self, block: nn.Module) -> Self:
        """Is entered while the block runs; only the last run counts."""
        self._given.clear()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.rstrip("_")
        given = [one.detach() for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        are_decided = bool(given) and all(map(self._is_decided, given))
        of_many = name in _OF_MANY or (name in _COUNTING and are_decided)
        decides = of_many or name in _EACH or kwargs.get("rounding_mode") is not None
        if decides and func._schema.is_mutable:
            given = [one.clone() for one in given]
        made = func(*args, **kwargs)
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if not decides:
            floats = [one for one in given if one.is_floating_point()]
            decides = bool(floats and results) and not all(one.is_floating_point() for one in results)
            given = floats if decides else given
        if decides:
            dims = _dims(func, args, kwargs) if of_many else ()
            self._given.setdefault(name, []).extend(_Given(one.clone().double(), dims) for one in given)
        for one in results:
            if are_decided or not one.is_floating_point():
                self._decided[one] = True
        return made

    def _is_decided(self, tensor: Tensor) -> bool:
        return not tensor.is_floating_point() or self._decided.get(tensor) is True

    def differ_from(self, rank: _Decisions) -> str:
        """Returns by what a rank decides that is neither what the whole decides by nor a part of it; "" where there is
        nothing."""
        for name, given in rank._given.items():
            for mine in given:
                shape = mine.tensor.shape
                found = [one for one in self._given.get(name, ()) if _holds(one.tensor.shape, shape)]
                if found and not any(_is_part(mine, one.tensor) for one in found):
                    return f"each rank decides by something else (aten::{name} of {list(shape)})"
        return ""


def _dims(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    for number, argument in enumerate(func._schema.arguments):
        if argument.name != "dim":
            continue
        dim = args[number] if number < len(args) else kwargs.get("dim", argument.default_value)
        dims = dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
        return tuple(one % max(1, args[0].dim()) for one in dims) or None
    return None


def _holds(whole: torch.Size, part: torch.Size) -> bool:
    """Whether a part of that size may be along one dimension."""
    return len(whole) == len(part) and sum(a != b for a, b in zip(whole, part, strict=True)) <= 1


def _is_part(given: _Given, whole: Tensor) -> bool:
    """Whether each slice of a tensor is one of the whole's, along the dimension in which their sizes differ, and nobody
    looks at many of them."""
    part = given.tensor
    if part.shape == whole.shape:
        return not _others(part, whole)
    dim = next(dim for dim, size in enumerate(part.shape) if size != whole.shape[dim])
    if given.dims is None or dim in given.dims:
        return False
    mine, its = (one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in (part, whole))
    if len(mine) > len(its):
        return False
    draw = torch.Generator().manual_seed(_SEED)
    # Equal slices have equal sums with weights drawn at random.
    weights = torch.randn(mine.shape[1], dtype=torch.float64, generator=draw)
    sums, places = (_bounded(its) @ weights).sort()
    wanted = _bounded(mine) @ weights
    above = torch.searchsorted(sums, wanted).clamp(max=len(its) - 1)
    below = (above - 1).clamp(min=0)
    nearest = torch.where((sums[above] - wanted).abs() < (sums[below] - wanted).abs(), above, below)
    return not _others(mine, its[places[nearest]])


def _bounded(numbers: Tensor) -> Tensor:
    return numbers.nan_to_num(0.0, 1.0, -1.0).clamp(-_MASKED, _MASKED)


def _others(found: Tensor, expected: Tensor) -> bool:
    usual = expected.abs() < _MASKED  # neither is NaN
    if not torch.equal(found.abs() < _MASKED, usual):
        return True
    largest = float(expected[usual].abs().max()) if bool(usual.any()) else 0.0
    difference = (found[usual] - expected[usual]).abs() > _ROUGH * expected[usual].abs() + _NOISE * max(1.0, largest)
    return bool(difference.any()) or not torch.allclose(found[~usual], expected[~usual], equal_nan=True)


class _Proof:
    def __init__(
        self,
        call: CapturedCall,
        split: BlockSplit,
        tp: int,
        training: bool,
        sequence: SequenceSplit | None = None,
        scale: float = 1.0,
    ) -> None:
        self._call, self._split, self._tp, self._sequence = call, split, tp, sequence
        self._runs = BlockRuns(call, split, tp, training=training, with_grad=True, scale=scale)
        self._is_first = scale == 1.0
        self._differ = functools.partial(differ, tolerance=TOLERANCE if self._is_first else _ROUGH)
        self.summed: set[str] = set()
        self.used = Used()
        self.of_whole = _Decisions()
        self._others = False

    def run(self) -> str:
        """Returns where ranks differ. A proof with larger weights does not count where the block computes no numbers
        with them."""
        if self._is_first:
            return self._run()
        try:
            return self._run()
        except Exception:  # of the whole block's
            return ""

    def _run(self) -> str:
        runs, of_ranks = self._runs, [_Decisions() for _ in range(self._tp)]
        output = runs.whole(watch=self._watched)
        if self._others:  # nobody sums their gradients
            return "it computes with weights of modules that are not registered in it"
        draw = torch.Generator().manual_seed(7)
        weights = {
            path: torch.randn(leaf.shape, dtype=leaf.dtype, generator=draw)
            for path, leaf in paths_of(output)
            if path in self._call.read and leaf.is_floating_point()
        }
        if not self._is_first and not all(bool(leaf.isfinite().all()) for _, leaf in paths_of(output)):
            return ""
        if self._is_first:
            with runs.modes():
                _loss(output, weights).backward()  # type: ignore[no-untyped-call]
        try:
            if not self._is_first:  # gradients of large numbers cancel; who decides otherwise returns something else
                outputs = runs.ranks(self._split, watches=[one.watch for one in of_ranks], sequence=self._sequence)
                by_parts = map(self.of_whole.differ_from, of_ranks)
                return next((one for one in (*self._wrong_results(output, outputs, weights), *by_parts) if one), "")
            outputs = runs.ranks(self._split, sequence=self._sequence, operators=self.used.operators)
            with runs.modes():
                torch.stack([_loss(out, weights) for out in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            return f"{self._tp} ranks raise {type(error).__name__}: {error}"
        return next(self._wrong(output, outputs, weights), "")

    @contextlib.contextmanager
    def _watched(self, block: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as hooks, Reads(block) as reads, self.of_whole.watch(block):
            for name, module in block.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: self.used.modules.add(name)))
            yield
        self.used.parameters.update(reads.parameters)
        self._others = reads.others

    def _wrong_results(self, output: Any, outputs: list[Any], weights: Mapping[Any, Tensor]) -> Iterator[str]:
        expected = dict(paths_of(output))
        for rank in range(self._tp):
            returned = dict(paths_of(outputs[rank]))
            for path in weights:
                if path not in returned or self._differ(returned[path], expected[path]):
                    yield f"rank {rank} returns something else"

    def _wrong(self, output: Any, outputs: list[Any], weights: Mapping[Any, Tensor]) -> Iterator[str]:
        whole, blocks = self._runs.block, self._runs.blocks
        yield from self._wrong_results(output, outputs, weights)
        for rank in range(self._tp):
            for path, leaf in self._runs.inputs.tensors.items():
                if self._differ(self._runs.of_ranks[rank].tensors[path].grad, leaf.grad):
                    yield f"rank {rank} has another gradient of argument {'.'.join(map(str, path))}"
        for name, parameter in whole.named_parameters():
            shard = self._split.shards.get(name)
            if name in self._runs.large:
                continue
            gradients = [block.get_parameter(name).grad for block in blocks]
            if self._sequence is not None and shard is None and _is_only_the_sum(gradients, parameter.grad):
                self.summed.add(name)
                continue
            for rank in range(self._tp):
                part = parameter.grad if shard is None or parameter.grad is None else shard.take(parameter.grad, rank)
                if self._differ(_whole_gradient(gradients, shard, rank), part):
                    yield f"rank {rank} has another gradient of {name}"
        for name, buffer in whole.named_buffers():
            for rank, block in enumerate(blocks):
                found = dict(block.named_buffers()).get(name)
                if found is None or self._differ(found.double(), buffer.double()):
                    yield f"rank {rank} makes another {name}"
        for rank, name, gradient, part in self._runs.factors.differences(self._split.shards, self._tp):
            if self._differ(gradient, part):
                yield f"rank {rank} has another gradient of {name}"


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
    block: nn.Module,
    split: BlockSplit,
    ops: EmulatedOps,
    sequence: SequenceSplit | None = None,
    operators: Operators | None = None,
) -> None:
    """Puts the forwards of a split on an emulated rank's block, which shares its sequence, too, if that is given.

    Args:
        operators: what it runs is added to it.
    """
    calls, parted = BlockCalls(ops), None
    if sequence is not None:
        parted = BlockSequence(block, sequence, SequenceLength(ops.size, ops.rank), ops, calls)
    watch = None if operators is None else OperatorWatch(block, NumberSet(), operators.update)
    install_block(Coat(), block, split, ops.rank, ops, calls, parted, watch)


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


def differ(found: Tensor | None, expected: Tensor | None, *, tolerance: float = TOLERANCE) -> bool:
    """Returns whether tensors differ by more than rounding in double precision."""
    if found is None or expected is None:
        none = found if expected is None else expected
        return none is not None and bool(none.any())
    if found.shape != expected.shape or bool(torch.isnan(found).any()):
        return True
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    return bool(((found - expected).abs() > tolerance * scale).any())


def with_weights(block: nn.Module, large: list[str], scale: float = 1.0) -> nn.Module:
    """Returns a copy of a block on the meta device with random weights in double precision, but for large ones.

    Args:
        scale: by which matrices are larger.
    """
    made = copy.deepcopy(block)
    for name, parameter in list(made.named_parameters()):
        replace_parameter(made, name, _blank(parameter.shape) if name in large else _random(name, parameter, scale))
    for module in made.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = _double(buffer)
    return made


def _random(name: str, like: Tensor, scale: float) -> nn.Parameter:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    value = torch.randn(like.shape, dtype=torch.float64, generator=draw)
    if like.dim() < 2:
        return nn.Parameter(0.3 * value + 1)
    factors = _uneven(like.shape[0], scale).view(-1, *[1] * (like.dim() - 1))
    return nn.Parameter(value * factors / like.shape[-1] ** 0.5)


def _uneven(count: int, scale: float) -> Tensor:
    """Returns factors, whose logarithms rise evenly from 0 to twice that of `scale`: so heads, and ranks, differ."""
    return scale ** torch.linspace(0.0, 2.0, count, dtype=torch.float64)


def _blank(shape: Iterable[int]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(*shape))


class _Inputs:
    """A call's arguments in double precision, perhaps with gradients."""

    def __init__(self, call: CapturedCall, with_grad: bool) -> None:
        def leaf(x: Tensor) -> Tensor:
            return _double(x).detach().clone().requires_grad_(with_grad and x.is_floating_point())

        self.args, self.kwargs = tree_map_only(Tensor, leaf, (call.args, call.kwargs))
        self.tensors = {path[1:]: x for path, x in paths_of((self.args, self.kwargs)) if x.requires_grad}


def _loss(output: Any, weights: Mapping[Any, Tensor]) -> Tensor:
    terms = [(leaf * weights[path]).sum() for path, leaf in paths_of(output) if path in weights]
    return torch.stack(terms).sum()


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


_SEED = 5

Watch = Callable[[nn.Module], AbstractContextManager[Any]]
"""Entered with a block while it runs."""


class BlockRuns:
    """Of one block, whole and as all ranks that share it, in double precision, with random weights; large ones are of
    low rank (`Factors`).

    Attributes:
        block, blocks: that ran whole, and as each rank.
        inputs, of_ranks: what they were given.
        large: parameters that have factors.
    """

    def __init__(
        self,
        call: CapturedCall,
        split: BlockSplit,
        tp: int,
        *,
        training: bool,
        with_grad: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Args:
        with_grad: for a backward, so that nothing may be drawn; else there is none.
        scale: by which matrices are larger.
        """
        self._call, self._tp, self._training, self._with_grad, self._scale = call, tp, training, with_grad, scale
        self._fill(Factors.candidates(call.block, split.shards))

    def _fill(self, large: list[str]) -> None:
        self.factors, self.large = Factors(self._scale), large
        self.block = with_weights(self._call.block, large, self._scale).train(self._training)
        self._buffers = {name: buffer.clone() for name, buffer in self.block.named_buffers()}

    def modes(self) -> contextlib.ExitStack:
        """Around runs and their backwards."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.set_grad_enabled(self._with_grad))
        stack.enter_context(DoubleMode())
        if self._training and self._with_grad:
            stack.enter_context(WithoutDraws())
        torch.manual_seed(_SEED)
        return stack

    def whole(self, mode: PartialDraws | None = None, watch: Watch = nullcontext) -> Any:
        """Returns what the whole block returns, run in this mode; `watch` may be entered again with another block."""
        large = [(name, self.block.get_parameter(name)) for name in self.large]
        self.inputs = _Inputs(self._call, self._with_grad)
        with self.modes(), self.factors.mode(-1, large, {}), mode or nullcontext(), watch(self.block):
            output = self.block(*self.inputs.args, **self.inputs.kwargs)
        unused = set(self.large) - self.factors.used
        if not unused:
            return output
        self._fill([name for name in self.large if name not in unused])  # what is no matrix product's needs values
        return self.whole(mode, watch)

    def ranks(
        self,
        split: BlockSplit,
        modes: Sequence[PartialDraws] = (),
        watches: Sequence[Watch] = (),
        sequence: SequenceSplit | None = None,
        operators: Operators | None = None,
    ) -> list[Any]:
        """Returns what each rank's share of the block returns, run in a mode of its own if there are any.

        Args:
            operators: what they run is added to it.
        """
        self.blocks = [shard_block(self.block, split, rank, self.large) for rank in range(self._tp)]
        self.of_ranks = [_Inputs(self._call, self._with_grad) for _ in self.blocks]
        for block in self.blocks:
            _set_buffers(block, self._buffers)

        def as_rank(ops: EmulatedOps) -> Any:
            mine, rank = self.blocks[ops.rank], ops.rank
            install_as_rank(mine, split, ops, sequence, operators)
            with modes[rank] if modes else nullcontext(), watches[rank](mine) if watches else nullcontext():
                return mine(*self.of_ranks[rank].args, **self.of_ranks[rank].kwargs)

        owned = [(rank, name, one.get_parameter(name)) for rank, one in enumerate(self.blocks) for name in self.large]
        with self.modes(), self.factors.modes(owned, split.shards):
            return EmulatedGroup(self._tp).run(as_rank)
