"""statistics(): what a rank's columns say about each row, in one pass that keeps the logits and nothing of their size.

The rest of a loss is arithmetic on numbers per token: the exponentials' sum is combined over ranks from partial ones
as in Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018. So the ranks meet once per loss, where
Megatron's cross-entropy (Shoeybi et al., 2019) meets three times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_AT_ONCE = 1 << 24
"""Elements of what is computed in higher precision, or exponentiated, at a time."""


def statistics(rows: Tensor, index: Tensor | None = None, *, total: bool = False) -> Tensor:
    """Returns [n, 1 to 3] of `rows` [n, columns] of this rank, in fp32 for types of 16 bits, else in their own type.

    Args:
        index: [n], a column of this rank, or -1 for none.
        total: whether the last number is asked for.
    Returns: per row logsumexp; with `index` the element there, or 0; with `total` the sum.
    """
    out: Tensor = _Statistics.apply(rows, index, total)  # type: ignore[no-untyped-call]
    return out


def precise(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which losses are computed, as in torch's kernels."""
    return torch.promote_types(dtype, torch.float32)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor | None, total: bool) -> Tensor:
        found = rows.new_empty((len(rows), 1 + (index is not None) + total), dtype=precise(rows.dtype))
        for some in _slices(rows):
            block = rows[some].to(found.dtype)
            found[some, 0] = block.logsumexp(-1)
            if index is not None:
                at = index[some].unsqueeze(-1)
                found[some, 1] = block.gather(-1, at.clamp(min=0)).masked_fill(at < 0, 0).squeeze(-1)
            if total:
                found[some, -1] = block.sum(-1)
        ctx.total = total
        ctx.save_for_backward(rows, index, found[:, 0].clone())
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows, index, logsumexp = ctx.saved_tensors
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, 0)  # exp(-inf - 0), not exp(-inf + inf)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for some in _slices(rows):
            share = out[some] if out.dtype == gradient.dtype else rows.new_empty(rows[some].shape, dtype=gradient.dtype)
            torch.sub(rows[some], logsumexp[some, None], out=share).exp_().mul_(gradient[some, :1])
            if index is not None:
                at = index[some].unsqueeze(-1)
                share.scatter_add_(-1, at.clamp(min=0), gradient[some, 1:2].masked_fill(at < 0, 0))
            if ctx.total:
                share.add_(gradient[some, -1:])
            if out.dtype != gradient.dtype:
                out[some] = share
        return out, None, None


def _slices(rows: Tensor) -> Iterator[slice]:
    step = max(1, _AT_ONCE // max(1, rows.shape[-1]))
    return (slice(at, at + step) for at in range(0, len(rows), step))
