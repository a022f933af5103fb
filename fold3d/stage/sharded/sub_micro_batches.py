"""Sub-micro-batches: a micro-batch in two or three by its samples, and what each of them counts for in a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fold3d.sharding.shard import even_part
from fold3d.stage.micro_batch import Inputs, MicroBatch
from fold3d.trace.example import follows, part_of, samples_of
from fold3d.trace.labels import IGNORED

Weights = tuple[float, ...]
"""By which the losses of the sub-micro-batches are multiplied before they are added."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_COARSE = 1e-3  # of 16-bit floats


@dataclass(frozen=True, slots=True)
class SubMicroBatch:
    """Some consecutive samples of a micro-batch."""

    micro_batch: MicroBatch
    first: int
    end: int
    samples: int
    """Of the whole micro-batch."""


def sub_micro_batches(whole: MicroBatch, most: int = 2) -> list[SubMicroBatch] | None:
    """Returns a micro-batch in parts, the first ones with a sample more where they are not equal; None where nobody
    knows how to divide it.

    Args:
        most: parts, where there are as many samples.
    """
    samples = samples_of(whole.inputs)
    if samples is None:
        return None

    def part(first: int, end: int) -> SubMicroBatch:
        mine: Inputs = part_of(whole.inputs, first, end, samples)
        return SubMicroBatch(replace(whole, inputs=mine), first, end, samples)

    parts = min(most, samples)
    return [part(*even_part(samples, parts, number)) for number in range(parts)]


def tolerance(dtype: torch.dtype) -> float:
    """Returns by which part of the largest value results of parts may differ from the whole's, of layers that compute
    in `dtype`: sums have another order."""
    return _TOLERANCE.get(dtype, _COARSE)


def divide(tensor: Tensor, parts: Sequence[SubMicroBatch]) -> Sequence[Tensor]:
    """Returns a tensor's parts for the sub-micro-batches; all of it for each where it does not follow the samples."""
    samples = parts[0].samples
    if not follows(tensor, samples):
        return [tensor] * len(parts)
    each = tensor.shape[0] // samples
    return torch.split(tensor, [each * (part.end - part.first) for part in parts])


def weights(parts: Sequence[SubMicroBatch], *, without_labels: bool = False) -> dict[str, Weights]:
    """Returns by what kind of loss the parts would have to be weighted how: a sum (such as one that is divided by the
    labels of the global batch), a mean over labels, or over those behind the first of each row, a mean over samples.

    A mean over labels is left out where a part has none, because its mean is no number.

    Args:
        without_labels: it is not, as long as any part has labels: others have weight 0, and must not be added.
    """
    found: dict[str, Weights] = {"sum": (1.0,) * len(parts)}
    for kind, first in (("mean over labels", 0), ("mean over shifted labels", 1)):
        counts = [_count(part.micro_batch.inputs.get("labels"), first) for part in parts]
        if any(counts) if without_labels else all(counts):
            found[kind] = tuple(count / sum(counts) for count in counts)
    samples = [part.end - part.first for part in parts]
    found["mean over samples"] = tuple(each / sum(samples) for each in samples)
    return found


def _count(labels: object, first: int) -> int:
    """Returns how many labels are no padding, from position `first` of the last dimension on."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim <= first:
        return 0
    return int(labels[..., first:].ne(IGNORED).sum())
