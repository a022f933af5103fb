"""Sums and means of tensors in parts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fold3d.tensor_parallel.vocabulary.call import Call, NeedsWhole, Rule, functions
from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel


def total(call: Call) -> Tensor:
    """`sum`: over the vocabulary, alone or among others, the ranks' sums are added; over other dimensions it stays."""
    tensor, dims, keeps, dtype = _arguments(call)
    return _sum(tensor, dims, keeps, dtype)


def mean(call: Call) -> Tensor:
    """`mean`: the sum by the number."""
    tensor, dims, keeps, dtype = _arguments(call)
    shape = tensor.shape_of_whole()
    dtype = dtype or tensor.memory().dtype
    if not dtype.is_floating_point:
        raise NeedsWhole  # and torch's own error there
    return _sum(tensor, dims, keeps, dtype) / math.prod(shape[dim] for dim in dims)


def _arguments(call: Call) -> tuple[ColumnParallel, list[int], bool, torch.dtype | None]:
    """Returns the tensor, the dimensions, all from 0, whether they are kept, and the result's type."""
    tensor = call.subject()
    ndim = len(tensor.shape_of_whole())
    dtype = next((one for one in call.args if isinstance(one, torch.dtype)), call.kwargs.get("dtype"))
    plain = [one for one in call.args[1:] if not isinstance(one, torch.dtype)]
    asked: Any = call.kwargs.get("dim", call.kwargs.get("axis"))
    keeps = bool(call.kwargs.get("keepdim", call.kwargs.get("keepdims", False)))
    if plain and isinstance(plain[-1], bool):
        keeps = plain.pop()
    if plain:
        asked = plain[0] if len(plain) == 1 else plain
    dims = [asked] if isinstance(asked, int) else list(asked) if asked is not None else []
    if not all(isinstance(dim, int) and -ndim <= dim < ndim for dim in dims):
        raise NeedsWhole
    return tensor, sorted({dim % ndim for dim in dims}) or list(range(ndim)), keeps, dtype


def _sum(tensor: ColumnParallel, dims: list[int], keeps: bool, dtype: torch.dtype | None) -> Tensor:
    part = tensor.part().sum(dims, keepdim=keeps, dtype=dtype)
    if tensor.vocabulary_dim not in dims:
        gone = 0 if keeps else sum(dim < tensor.vocabulary_dim for dim in dims)
        return tensor.like(part, tensor.vocabulary_dim - gone)
    return tensor.columns.add_up(part)


def rules() -> dict[Any, Rule]:
    """Returns the rules of this file by function."""
    return {**dict.fromkeys(functions("sum"), total), **dict.fromkeys(functions("mean"), mean)}
