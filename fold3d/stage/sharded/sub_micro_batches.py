"""Sub-micro-batches: a micro-batch in parts by its samples, and what each of them counts for in a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fold3d.sharding.shard import even_part
from fold3d.trace.example import follows, part_of, samples_of
from fold3d.trace.labels import IGNORED

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_OF_16_BITS = 1e-3


@dataclass(frozen=True, slots=True)
class SubMicroBatch:
    """Some consecutive samples of a micro-batch."""

    inputs: dict[str, Any]
    """By argument name."""
    first: int
    end: int
    samples: int
    """Of the whole micro-batch."""


def sub_micro_batches(whole: Mapping[str, Any], most: int = 2) -> list[SubMicroBatch]:
    """Returns a micro-batch in parts, the first ones with a sample more where they are not equal; one part where nobody
    knows how to divide it.

    Args:
        most: parts, where there are as many samples.
    """
    samples = samples_of(whole) if most > 1 else None
    if samples is None:
        return [SubMicroBatch(dict(whole), 0, 1, 1)]
    parts = [even_part(samples, min(most, samples), number) for number in range(min(most, samples))]
    return [SubMicroBatch(part_of(whole, *part, samples), *part, samples) for part in parts]


def tolerance(dtype: torch.dtype) -> float:
    """Returns by which part of the largest value results of parts may differ from the whole's, of layers that compute
    in `dtype`: sums have another order."""
    return _TOLERANCE.get(dtype, _OF_16_BITS)


def divide(tensor: Tensor, parts: Sequence[SubMicroBatch]) -> Sequence[Tensor]:
    """Returns a tensor's parts for the sub-micro-batches; all of it for each where it does not follow the samples."""
    samples = parts[0].samples
    if not follows(tensor, samples):
        return [tensor] * len(parts)
    each = tensor.shape[0] // samples
    return torch.split(tensor, [each * (part.end - part.first) for part in parts])


def weights(parts: Sequence[SubMicroBatch], reduction: str, *, first: int = 0) -> list[float]:
    """Returns by which the parts' losses are multiplied before they are added.

    Args:
        first: from which position of a row on labels count.
        reduction: what the loss is of its samples: "sum", the "mean" over them, or over labels ("tokens"); a part
            without labels then counts 0, and its loss, which is no number, must not be added.
    """
    if reduction == "sum":
        return [1.0] * len(parts)
    counts = [
        part.end - part.first if reduction == "mean" else _count(part.inputs.get("labels"), first) for part in parts
    ]
    return [count / max(sum(counts), 1) for count in counts]


def _count(labels: object, first: int) -> int:
    """Returns how many labels are no padding."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < first:
        return 0
    return int((labels[..., first:] if first else labels).ne(IGNORED).sum())
