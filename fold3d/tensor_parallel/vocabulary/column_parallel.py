"""ColumnParallel: a tensor as large as the whole, of which each rank holds some columns; what autograd knows of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from fold3d.tensor_parallel.vocabulary.columns import Columns

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
