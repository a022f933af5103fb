"""Sub-micro-batches: a micro-batch in two or three by its samples, and what each of them counts for in a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fold3d.sharding.shard import even_part
from fold3d.stage.micro_batch import Inputs, MicroBatch
from fold3d.trace.labels import IGNORED

Weights = tuple[float, ...]
"""By which the losses of the sub-micro-batches are multiplied before they are added."""


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

    Dimension 0 of every tensor must be the samples, or 1 for what all of them share; containers could hold anything.

    Args:
        most: parts, where there are as many samples.
    """
    inputs = whole.inputs
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.ndim]
    samples = max((tensor.shape[0] for tensor in tensors), default=0)
    if samples < 2 or any(tensor.shape[0] not in (1, samples) for tensor in tensors):
        return None
    if any(isinstance(value, (dict, list, tuple)) for value in inputs.values()):
        return None
    followers = [name for name, value in inputs.items() if isinstance(value, Tensor) and follows(value, samples)]

    def part(first: int, end: int) -> SubMicroBatch:
        mine: Inputs = {name: value[first:end] if name in followers else value for name, value in inputs.items()}
        return SubMicroBatch(replace(whole, inputs=mine), first, end, samples)

    parts = min(most, samples)
    return [part(*even_part(samples, parts, number)) for number in range(parts)]


def follows(tensor: Tensor, samples: int) -> bool:
    """Whether dimension 0 of a tensor can be the samples, or so many entries for each of them."""
    return bool(tensor.ndim and tensor.shape[0] and tensor.shape[0] % samples == 0)


def divide(tensor: Tensor, parts: Sequence[SubMicroBatch]) -> Sequence[Tensor]:
    """Returns a tensor's parts for the sub-micro-batches; all of it for each where it does not follow the samples."""
    samples = parts[0].samples
    if not follows(tensor, samples):
        return [tensor] * len(parts)
    each = tensor.shape[0] // samples
    return torch.split(tensor, [each * (part.end - part.first) for part in parts])


def weights(parts: Sequence[SubMicroBatch]) -> dict[str, Weights]:
    """Returns by what kind of loss the parts would have to be weighted how: a sum (such as one that is divided by the
    labels of the global batch), a mean over labels, or over those behind the first of each row, a mean over samples.

    A mean over labels is left out where a part has none, because its mean is no number.
    """
    samples = parts[0].samples
    found: dict[str, Weights] = {"sum": (1.0,) * len(parts)}
    labels = [part.micro_batch.inputs.get("labels") for part in parts]
    for kind, first in (("mean over labels", 0), ("mean over shifted labels", 1)):
        counts = [_count(one, first) for one in labels]
        if all(counts):
            found[kind] = tuple(count / sum(counts) for count in counts)
    found["mean over samples"] = tuple((part.end - part.first) / samples for part in parts)
    return found


def _count(labels: object, first: int) -> int:
    """Returns how many labels are no padding, from position `first` of the last dimension on."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim <= first:
        return 0
    return int(labels[..., first:].ne(IGNORED).sum())
