"""grouped_mm(): torch's grouped matrix product from single ones, in any precision; torch's own has no doubles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GROUPED = frozenset({torch._grouped_mm, torch.nn.functional.grouped_mm})
"""The functions that it stands for."""


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Returns what `torch.nn.functional.grouped_mm` does, and zeros in rows and columns behind the last group.

    Args:
        mat_a: [M, K] or [groups, M, K].
        mat_b: [K, N] or [groups, K, N].
        offs: [groups] where each group ends in the dimension that the groups share: M where only `mat_b` has a
            dimension of groups, N where only `mat_a` has one, K where neither has. None where both have.
    """
    if offs is None:
        found = torch.bmm(mat_a, mat_b)
    else:
        pieces = list(enumerate(pairwise((0, *offs.tolist()))))
        if mat_b.dim() == 3:
            parts = [mat_a[first:end] @ mat_b[k] for k, (first, end) in pieces]
            rest = mat_a.new_zeros(mat_a.shape[0] - pieces[-1][1][1], mat_b.shape[2])
            found = torch.cat([*parts, rest])
        elif mat_a.dim() == 3:
            parts = [mat_a[k] @ mat_b[:, first:end] for k, (first, end) in pieces]
            rest = mat_b.new_zeros(mat_a.shape[1], mat_b.shape[1] - pieces[-1][1][1])
            found = torch.cat([*parts, rest], 1)
        else:
            found = torch.stack([mat_a[:, first:end] @ mat_b[first:end] for _, (first, end) in pieces])
    found = found if bias is None else found + bias
    return found if out_dtype is None else found.to(out_dtype)
