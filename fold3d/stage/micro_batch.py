"""Taking a replica's batch apart into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MicroBatch = dict[str, Any]


def split_batch(batch: Mapping[str, Any], parts: int) -> list[MicroBatch]:
    """Returns `parts` micro-batches: equal slices of dimension 0 of every tensor, other values unchanged.

    Raises: ValueError when a tensor does not divide.
    """
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (value.ndim == 0 or value.shape[0] % parts or not value.shape[0]):
            raise ValueError(
                f"batch[{name!r}] has shape {list(value.shape)}: dimension 0 does not divide into "
                f"micro_batches={parts}; change the batch size or micro_batches"
            )
    slices = {name: value.chunk(parts) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return [{name: slices[name][i] if name in slices else value for name, value in batch.items()} for i in range(parts)]
