"""ColumnParallel: a tensor as large as the whole, of which each rank holds some columns; what autograd knows of it."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.sharding.shard import Shard
from fold3d.tensor_parallel.region import COPY, REDUCE, RegionOps

logger = logging.getLogger(__name__)


class Columns:
    """Of one rank: the entries [first, first + length) of `size`. All ranks of the group make the same calls.

    All exchanges are sums over the ranks (`RegionOps`): a part with zeros around it, summed, is the whole, to the bit
    and for parts of any length.

    Raises: ValueError for a Shard whose parts are not one run each.
    """

    def __init__(self, shard: Shard, ops: RegionOps) -> None:
        runs = shard.parts[ops.rank]
        if len(runs) != 1 or shard.ranks != ops.size:
            raise ValueError(f"the entries {runs} of {shard.ranks} ranks are no run of one of {ops.size} ranks")
        self.ops, self.size = ops, shard.size
        self.first, self.end = runs[0]
        self._said: set[str] = set()

    @property
    def length(self) -> int:
        """How many entries this rank has."""
        return self.end - self.first

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where in this rank's part the entries `ids` are (0 for others'), and which of them are there.

        Raises: IndexError for ids in host memory that are no entries, as torch's functions do; on devices an
            assertion of the device fails.
        """
        outside = (ids < 0) | (ids >= self.size)
        if ids.device.type != "cpu":
            torch._assert_async(~outside.any(), "an index is out of the vocabulary's range")
        elif bool(outside.any()):
            wrong = int(ids[outside][0])
            raise IndexError(f"index {wrong} is out of range: the vocabulary has {self.size} entries")
        mine = (ids >= self.first) & (ids < self.end)
        return (ids - self.first).masked_fill(~mine, 0), mine

    def add_up(self, share: Tensor) -> Tensor:
        """Returns the sum of everybody's `share`; each one's gradient is the sum's, which is the same on every rank."""
        if share.dtype.is_floating_point:
            return self.ops.exchange(share, REDUCE)
        # exact to 2^53; sums of integers are not what every way to exchange has
        return self.ops.exchange(share.double(), REDUCE).to(share.dtype)

    def gather(self, part: Tensor, along: int) -> Tensor:
        """Returns the whole tensor of which everybody has `part` along dimension `along`; the gradient is the own part
        of the whole's, which is the same on every rank."""
        behind = part.ndim - 1 - along
        return self.add_up(functional.pad(part, [0, 0] * behind + [self.first, self.size - self.end]))

    def scatter(self, whole: Tensor, along: int) -> Tensor:
        """Returns this rank's part, a view, of a tensor that all have; its gradient is whole on every rank."""
        return self.share(whole).narrow(along, self.first, self.length)

    def share(self, x: Tensor) -> Tensor:
        """Returns `x`, the same on every rank, for use with parts: its gradient is summed over the ranks."""
        return self.ops.exchange(x, COPY) if x.requires_grad and torch.is_grad_enabled() else x

    def exchange(self, values: Tensor) -> Tensor:
        """Returns everybody's `values`, equally large, as [ranks, ...] in the order of ranks; the gradient of the own
        ones is that of their place."""
        none = torch.zeros_like(values)
        places = [values if rank == self.ops.rank else none for rank in range(self.ops.size)]
        return self.ops.exchange(torch.stack(places), REDUCE)

    def say_gathered(self, operation: str) -> None:
        """Logs, once per operation and on one rank of the group, why logits become whole in training."""
        if torch.is_grad_enabled() and self.ops.rank == 0 and operation not in self._said:
            self._said.add(operation)
            logger.warning(
                "'%s' needs the logits of the whole vocabulary: each rank of the tensor-parallel group gathers all %d "
                "columns. The usual losses (cross_entropy, log_softmax, nll_loss, logsumexp) do without",
                operation,
                self.size,
            )


Self = TypeVar("Self", bound="ColumnParallel")


class ColumnParallel(Tensor):
    """Stands for a tensor that is the same on every rank of the group; dimension `vocabulary_dim` is the vocabulary.

    Shape, dtype and device are those of the whole, memory is that of this rank's part. For autograd it is an ordinary
    tensor: `of` and `part` are the ways in and out, and a gradient is the part's or, from code that knows nothing of
    parts, the whole's, which is the same on every rank.
    """

    _mine: Tensor
    columns: Columns
    vocabulary_dim: int
    _whole: tuple[int, bool, Tensor] | None
    is_view: bool
    """Whether its memory is that of another one of these: writing into it would change that, unseen by autograd."""

    @staticmethod
    def __new__(cls: type[Self], mine: Tensor, columns: Columns, along: int, is_view: bool = False) -> Self:
        """Args:
        mine: the part, without gradient: [..., columns.length at `vocabulary_dim`, ...].
        """
        shape = list(mine.shape)
        shape[along] = columns.size
        strides = [0] * len(shape)
        step = 1
        for dim in sorted(range(len(shape)), key=lambda dim: (mine.stride(dim), -dim)):
            strides[dim] = step
            step *= max(shape[dim], 1)
        made: Self = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=mine.dtype, layout=mine.layout, device=mine.device
        )
        made._mine, made.columns, made.vocabulary_dim, made.is_view, made._whole = mine, columns, along, is_view, None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def of(cls: type[Self], part: Tensor, columns: Columns, along: int, is_view: bool = False) -> Self:
        """Returns the tensor of which this rank holds `part`; the gradient of `part` is its part of the gradient."""
        made: Self = _Join.apply(part, cls, columns, along, is_view)  # type: ignore[no-untyped-call]
        return made

    def like(self: Self, part: Tensor, along: int, is_view: bool = False) -> Self:
        """Returns `of` the same columns."""
        return type(self).of(part, self.columns, along, is_view)

    def part(self) -> Tensor:
        """Returns this rank's part, in this tensor's memory, with its gradient."""
        found: Tensor = _Part.apply(self)  # type: ignore[no-untyped-call]
        return found

    def memory(self) -> Tensor:
        """Returns this rank's part without a gradient."""
        return self._mine

    def shape_of_whole(self) -> list[int]:
        """Returns the shape, by no function of torch that subclasses see."""
        shape = list(self._mine.shape)
        shape[self.vocabulary_dim] = self.columns.size
        return shape

    def behind(self) -> int:
        """Returns the vocabulary's dimension counted from the end: 1 is the last."""
        return self._mine.ndim - self.vocabulary_dim

    def matches(self, other: ColumnParallel) -> bool:
        """Returns whether both have the same vocabulary, at the same place from the end."""
        return self.columns is other.columns and self.behind() == other.behind()

    def whole(self) -> Tensor:
        """Returns the whole tensor, kept for the next call; every rank of the group calls."""
        if self._mine.is_inference():  # nobody counts what is written into it
            return self.columns.gather(self.part(), self.vocabulary_dim)
        version, with_gradient = self._mine._version, torch.is_grad_enabled()
        if self._whole is None or self._whole[:2] != (version, with_gradient):
            self._whole = (version, with_gradient, self.columns.gather(self.part(), self.vocabulary_dim))
        return self._whole[2]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, cls: type[ColumnParallel], columns: Columns, along: int, is_view: bool
    ) -> Tensor:
        ctx.the_columns, ctx.the_dim = columns, along
        return cls(part.detach(), columns, along, is_view)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if isinstance(gradient, ColumnParallel):
            return gradient.memory(), None, None, None, None
        return gradient.narrow(ctx.the_dim, ctx.the_columns.first, ctx.the_columns.length), None, None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: ColumnParallel) -> Tensor:
        ctx.the_class, ctx.the_columns, ctx.the_dim = type(whole), whole.columns, whole.vocabulary_dim
        mine = whole.memory()
        return mine.view_as(mine)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.the_class(gradients[0], ctx.the_columns, ctx.the_dim)


_aten = torch.ops.aten
_SAME_PLACES = frozenset(
    {_aten.detach, _aten.alias, _aten.clone, _aten._to_copy, _aten.zeros_like, _aten.ones_like, _aten.empty_like}
)


def beneath(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator, below autograd, with ColumnParallels among its arguments.

    What works on each element alone does so on parts; tensors of the whole's shape are cut to them. Everything else
    runs on whole tensors: the ranks gather them, in the same order, because they run the same program.
    """
    ours = [one for one in tree_leaves((args, kwargs)) if isinstance(one, ColumnParallel)]
    first = ours[0]
    if func.overloadpacket is _aten.copy_:
        return _copy(args[0], args[1])
    alone = torch.Tag.pointwise in func.tags or func.overloadpacket in _SAME_PLACES
    moves = kwargs.get("device", first.memory().device) != first.memory().device
    if alone and not moves and all(one.matches(first) for one in ours):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if all(isinstance(one, ColumnParallel) or _fits(one, first) for one in tensors):
            return _on_parts(func, args, kwargs, first)
    return _on_whole(func, args, kwargs)


def _fits(tensor: Tensor, like: ColumnParallel) -> bool:
    return tensor.ndim < like.behind() or tensor.shape[-like.behind()] in (1, like.columns.size)


def _on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: ColumnParallel) -> Any:
    behind, columns = first.behind(), first.columns

    def local(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ColumnParallel):
            return tensor.memory()
        if tensor.ndim < behind or tensor.shape[-behind] == 1:
            return tensor
        return tensor.narrow(tensor.ndim - behind, columns.first, columns.length)

    inner, inner_kwargs = tree_map_only(Tensor, local, (args, kwargs))
    result = func(*inner, **inner_kwargs)
    if func._schema.is_mutable:
        return args[0]
    return tree_map_only(Tensor, lambda part: type(first)(part, columns, part.ndim - behind), result)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = args[0] if func._schema.is_mutable and args and isinstance(args[0], ColumnParallel) else None
    inner, inner_kwargs = tree_map_only(ColumnParallel, _gather, (args, kwargs))
    result = func(*inner, **inner_kwargs)
    if written is None:
        return result
    _copy(written, inner[0])
    return written


def _gather(one: ColumnParallel) -> Tensor:
    return one.columns.gather(one.memory(), one.vocabulary_dim)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    if not isinstance(target, ColumnParallel):
        return target.copy_(_gather(source) if isinstance(source, ColumnParallel) else source)
    columns = target.columns
    if isinstance(source, ColumnParallel):
        same = source.matches(target)
        part = source.memory() if same else None
        source = source if same else _gather(source)
    else:
        part = source if source.ndim < target.behind() or source.shape[-target.behind()] == 1 else None
    if part is None:
        part = source.narrow(source.ndim - target.behind(), columns.first, columns.length)
    target.memory().copy_(part)
    return target
