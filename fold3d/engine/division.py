"""Division: the user's micro-batches in parts of at most `micro_batch_size` samples, which the schedule runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fold3d.device import library_rng_state, same_library_rng_state, set_library_rng_state
from fold3d.engine.pipeline import Pipeline
from fold3d.errors import ConfigError
from fold3d.schedule import Schedule
from fold3d.stage.micro_batch import Inputs, MicroBatch, ModelCall
from fold3d.stage.once.buffer_values import BufferValues
from fold3d.stage.sharded.sub_micro_batches import SubMicroBatch, sub_micro_batches, tolerance, weights
from fold3d.trace.example import part_of, samples_of

COMPARED = 3
"""Runs of a comparison: two parts together, and each of them."""
_Pair = tuple[int, SubMicroBatch, SubMicroBatch]
"""Number of a micro-batch, and two neighbours of it."""


def number_of_parts(inputs: Mapping[str, Any], size: int) -> int:
    """Returns into how many parts of at most `size` samples a micro-batch is divided.

    Raises: ConfigError where nobody knows how to divide it.
    """
    if _most(inputs) <= size:
        return 1
    samples = samples_of(inputs)
    if samples is None:
        why = why_not_divided(inputs)
        raise ConfigError(f"micro_batch_size={size}: {why}; remove micro_batch_size, and lower the batch size instead")
    return -(-samples // size)


def why_not_divided(inputs: Mapping[str, Any]) -> str:
    """Returns why nobody knows how to divide a micro-batch of several samples; "" where that is known."""
    most = _most(inputs)
    if most < 2 or samples_of(inputs) is not None:
        return ""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    odd = next((name for name, tensor in tensors.items() if tensor.shape[0] not in (1, most)), None)
    if odd is not None:
        return f"batch[{odd!r}] has shape {list(tensors[odd].shape)}, and others have {most} samples in dimension 0"
    odd = next(name for name, value in inputs.items() if isinstance(value, (dict, list, tuple)))
    return f"batch[{odd!r}] is a {type(inputs[odd]).__name__}, of which nobody knows where its samples are"


def _most(inputs: Mapping[str, Any]) -> int:
    return max((value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.ndim), default=0)


class Division:
    """Of one rank; all ranks of a replica have the same micro-batches, so they decide alike.

    The gradients and the loss are those of the undivided micro-batches, masks of dropout included (`PartDraws`). What a
    part's loss counts for is found out, not assumed: two parts run together and one by one, without a backward, and
    their losses are compared. So a sum is told from a mean over labels or over samples, and where nothing fits
    (statistics over the batch, losses that compare samples) that is an error. Comparing goes on while it makes a
    difference: parts with as many labels each do not tell both means apart, and need not.
    """

    def __init__(
        self, size: int, pipeline: Pipeline, schedule: Schedule, model: Module, *, in_16_bits: Callable[[], bool]
    ) -> None:
        """Args:
        size: most samples of a part.
        schedule: forwards of three micro-batches, without backwards.
        in_16_bits: whether layers compute in 16 bits.
        """
        self._size, self._pipeline, self._schedule, self._model = size, pipeline, schedule, model
        self._in_16_bits = in_16_bits
        self._kinds: list[str] | None = None  # that the loss can be, the likeliest first; None: nothing was compared

    def count(self, inputs: Sequence[Inputs]) -> int:
        """Returns the number of parts. Raises: ConfigError where a micro-batch cannot be divided."""
        return sum(number_of_parts(one, self._size) for one in inputs)

    def parts(self, wholes: Sequence[MicroBatch], flush: Callable[[], None]) -> list[MicroBatch]:
        """Returns the parts of a step's micro-batches, in their order; where the loss is a mean over labels, without
        those that have none.

        Runs forwards in the first step. All ranks of the replica call.

        Args:
            flush: brings weights up to date.
        Raises: ConfigError, on all of them, for a loss that is none of its parts' weighted sums.
        """
        divided = [self._divide(whole) for whole in wholes]
        pair = self._to_compare(divided)
        if pair is not None:
            flush()
            self._compare(wholes[pair[0]].inputs, *pair[1:])
        return [part for parts in divided for part in self._weighted(parts)]

    def _divide(self, whole: MicroBatch) -> list[SubMicroBatch]:
        number = number_of_parts(whole.inputs, self._size)
        parts = sub_micro_batches(whole, number) if number > 1 else None
        return parts or [SubMicroBatch(whole, 0, 1, 1)]

    def _to_compare(self, divided: Sequence[Sequence[SubMicroBatch]]) -> _Pair | None:
        """Returns the neighbours whose losses say most of what the loss is; None: there is nothing to find out."""
        if self._kinds is not None and len(self._kinds) == 1:
            return None
        pairs = [(number, *pair) for number, parts in enumerate(divided) for pair in itertools.pairwise(parts)]
        if not pairs:
            return None

        def says(pair: _Pair) -> tuple[int, float]:
            by_kind = weights(pair[1:], without_labels=True)
            means = [one[0] for kind, one in by_kind.items() if kind != "sum" and self._may_be(kind)]
            return len(means), max(means, default=0.0) - min(means, default=0.0)

        best = max(pairs, key=says)
        return best if self._kinds is None or says(best)[1] > 0 else None

    def _may_be(self, kind: str) -> bool:
        return self._kinds is None or kind in self._kinds

    def _compare(self, inputs: Inputs, one: SubMicroBatch, other: SubMicroBatch) -> None:
        """Learns what the loss can be from two neighbours of a micro-batch with `inputs`."""
        runs, by_kind = _together(inputs, one, other), weights([one, other], without_labels=True)
        drawn, buffers = library_rng_state(), BufferValues(self._model)
        results = self._pipeline.run(self._schedule, runs, backward=False)
        draws = not same_library_rng_state(drawn, library_rng_state())
        set_library_rng_state(drawn)
        found = torch.zeros(COMPARED + 3, dtype=torch.float64)
        if self._pipeline.has_result and all(isinstance(one, Tensor) and one.numel() == 1 for one in results):
            found[:COMPARED] = torch.stack([one.double().reshape(()) for one in results]).cpu()
            found[-1] = tolerance(torch.bfloat16 if self._in_16_bits() else results[0].dtype)
        found[-2], found[-3] = float(buffers.restore()), float(draws)
        self._pipeline.sum_over_replica(found, runs)
        whole, first, second, drew, changed, allowed = found.tolist()
        if changed:
            self._refuse("its forward changes buffers (statistics of a batch norm are such)")
        if allowed == 0.0 or not math.isfinite(whole):  # the step says what is wrong with the loss
            return
        losses = (first, second)  # that of a part without labels may be no number
        sums = {
            kind: [weight * loss for weight, loss in zip(each, losses, strict=True) if weight]
            for kind, each in by_kind.items()
            if self._may_be(kind)
        }
        errors = {kind: abs(whole - sum(each)) / max(abs(whole), *map(abs, each), 1e-30) for kind, each in sums.items()}
        kinds = sorted((kind for kind, error in errors.items() if error <= allowed), key=errors.__getitem__)
        if not kinds:
            random = "; it draws from Python's or numpy's generator, too" if drew else ""
            self._refuse(
                f"the loss of two parts together is {whole:.8g}, and that of each {first:.8g} and {second:.8g}: no "
                "sum, and no mean over labels or samples. What is computed of a sample depends on the others, or on "
                f"random numbers that are not drawn for each sample{random}"
            )
        self._kinds = kinds

    def _refuse(self, why: str) -> None:
        raise ConfigError(
            f"micro_batch_size={self._size}: this model's micro-batches cannot be divided, because {why}. Remove "
            "micro_batch_size; for less memory there are recompute and offload"
        )

    def _weighted(self, parts: Sequence[SubMicroBatch]) -> list[MicroBatch]:
        if len(parts) == 1:
            return [parts[0].micro_batch]
        kind = self._kinds[0] if self._kinds else "sum"
        if kind == "sum":  # labels need not be counted
            return [_part(part, 1.0) for part in parts]
        # A mean over no labels is no number, nor is that of all parts where none has any.
        each = weights(parts, without_labels=True).get(kind, (1.0,))
        return [_part(part, weight) for part, weight in zip(parts, each, strict=False) if weight]


def _part(part: SubMicroBatch, weight: float) -> MicroBatch:
    call = part.micro_batch.call if weight == 1.0 else _times(part.micro_batch.call, weight)
    # A copy has containers of its own for what is found while it runs.
    return MicroBatch(part.micro_batch.inputs, call, part.micro_batch.key, part=(part.first, part.end, part.samples))


def _times(call: ModelCall, weight: float) -> ModelCall:
    def weighted(model: Module, inputs: Inputs) -> Any:
        loss = call(model, inputs)
        return loss * weight if isinstance(loss, Tensor) else loss

    return weighted


def _together(inputs: Inputs, one: SubMicroBatch, other: SubMicroBatch) -> list[MicroBatch]:
    """Returns two neighbours together, and each of them, as they run to be compared."""
    middle, samples = one.end - one.first, other.end - one.first
    both = part_of(inputs, one.first, other.end, one.samples)

    def run(mine: Inputs, part: tuple[int, int, int] | None) -> MicroBatch:
        return MicroBatch(mine, one.micro_batch.call, one.micro_batch.key, part=part, compares=True)

    return [
        run(both, None),
        run(one.micro_batch.inputs, (0, middle, samples)),
        run(other.micro_batch.inputs, (middle, samples, samples)),
    ]
