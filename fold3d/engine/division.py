"""Division: the user's micro-batches in parts of at most `micro_batch_size` samples, which the schedule runs."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module

from fold3d.device import library_rng_state, same_library_rng_state, set_library_rng_state
from fold3d.engine.pipeline import Pipeline
from fold3d.errors import ConfigError
from fold3d.schedule import Schedule
from fold3d.stage.micro_batch import Inputs, LossFunction, MicroBatch, loss_run
from fold3d.stage.replay import ModelValues, uniform_weights_filled
from fold3d.stage.sub_pipeline import Comparisons, GradientsOfParts, SubMicroBatch, sub_micro_batches, tolerance
from fold3d.stage.sub_pipeline import weights as weights_of
from fold3d.stage.users_state import namespaces_of, put_back
from fold3d.trace.arguments import Form, form_of
from fold3d.trace.batches import balances_experts, borders_in, part_of, samples_of, shifts_labels

logger = logging.getLogger(__name__)

COMPARED = 3
"""Runs of a comparison: two parts together, and each of them."""


def number_of_parts(inputs: Mapping[str, Any], size: int) -> int:
    """Returns into how many parts of at most `size` samples a micro-batch is divided.

    Raises: ConfigError where nobody knows how to divide it.
    """
    if _most(inputs) <= size and borders_in(inputs) is None:
        return 1
    samples = samples_of(inputs)
    if samples is None:
        why = why_not_divided(inputs)
        raise ConfigError(f"micro_batch_size={size}: {why}; remove micro_batch_size, and lower the batch size instead")
    return -(-samples // size)


def why_not_divided(inputs: Mapping[str, Any]) -> str:
    """Returns why nobody knows how to divide a micro-batch of several samples; "" where that is known."""
    if (borders := borders_in(inputs)) is not None:
        return (
            f"batch[{borders!r}] says where the sequences that are packed in a row begin, so a row is one sample, and "
            "its tokens belong together"
        )
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

    The gradients and the loss are those of the undivided micro-batches, masks of dropout included (`PartDraws`), where
    the loss adds up over samples: by construction, as transformers' own loss functions do that divide by the labels of
    the global batch, or because the user has said how (`loss_reduction`). What was said is checked: in the first step,
    and when `Comparisons` says so, two parts also run together, without a backward, and the losses are compared. Other
    losses are refused: a mean over positions that are
    masked or weighed otherwise, a term that compares samples, cannot be told from one that adds up by its values.
    """

    def __init__(
        self,
        size: int | None,
        pipeline: Pipeline,
        schedule: Schedule,
        model: Module,
        reduction: str | None,
        *,
        in_16_bits: Callable[[], bool],
        foresees: bool = False,
    ) -> None:
        """Args:
        size: most samples of a part; None: micro-batches stay whole.
        schedule: forwards of three micro-batches, without backwards.
        reduction: "sum", "mean" or "tokens", as the user says; None: what the loss function says of itself.
        in_16_bits: whether layers compute in 16 bits.
        foresees: the size may change: with the first micro-batch it is found out whether it can.
        """
        self._size, self._pipeline, self._schedule, self._model = size, pipeline, schedule, model
        self._reduction, self._in_16_bits = reduction, in_16_bits
        self._comparisons = Comparisons(model)
        self._foresees = foresees
        self._gradients = GradientsOfParts(model, of_weights=True)
        self._told: dict[Form, float] = {}
        """How unevenly labels were spread, at most, where parts were compared."""
        self.may_divide = False
        """Whether another size may be set; of one that foresees that, after the first step."""

    def count(self, inputs: Sequence[Inputs]) -> int:
        """Returns the number of parts. Raises: ConfigError where a micro-batch cannot be divided."""
        return sum(self._number(one) for one in inputs)

    def parts(
        self, wholes: Sequence[MicroBatch], function: LossFunction, flush: Callable[[], None]
    ) -> list[MicroBatch]:
        """Returns the parts of a step's micro-batches, in their order; where the loss is a mean over labels, without
        those that have none.

        Runs forwards in the first step. All ranks of the replica call.

        Args:
            function: computes the loss.
            flush: brings weights up to date.
        Raises: ConfigError, on all of them, for a loss that is none of its parts' weighted sums.
        """
        if self._foresees:
            self._foresees = False
            self.may_divide = self._can_divide(wholes[0], function, flush)
        divided = [sub_micro_batches(whole.inputs, self._number(whole.inputs)) for whole in wholes]
        made: list[MicroBatch] = []
        for whole, parts in zip(wholes, divided, strict=True):
            if len(parts) == 1:
                made.append(whole)
                continue
            kind = self._kind(function)
            form = form_of(whole.inputs)
            # A sum is told from means by any micro-batch; to count labels waits for a GPU.
            uneven = 0.0 if kind == "sum" else _uneven(*self._pair(kind, parts))
            tells = uneven > 2 * self._told.get(form, _TELLING)
            if self._comparisons.note(form, whole.inputs) or tells:
                self._told[form] = max(uneven, self._told.get(form, _TELLING))
                flush()
                self._compare(kind, whole, function, *self._pair(kind, parts))
            weights = self._weights(parts, kind)
            if not any(weights):  # without labels: what its loss is then, nobody knows
                made.append(whole)
                continue
            made += [
                self._part(whole, function, part, weight) for part, weight in zip(parts, weights, strict=True) if weight
            ]
        return made

    def resize(self, size: int) -> None:
        """Parts have at most so many samples from now on; only where `may_divide` says that they may."""
        self._size = size

    def _number(self, inputs: Inputs) -> int:
        return 1 if self._size is None else number_of_parts(inputs, self._size)

    def _can_divide(self, whole: MicroBatch, function: LossFunction, flush: Callable[[], None]) -> bool:
        """Returns whether a micro-batch's loss adds up; all ranks of the replica call."""
        if self._size is not None and self._number(whole.inputs) > 1:
            return True  # else it is refused
        samples = samples_of(whole.inputs)
        if samples is None or samples < 2:
            return False
        try:
            kind, parts = self._kind(function), sub_micro_batches(whole.inputs, 2)
            flush()
            self._compare(kind, whole, function, *self._pair(kind, parts))
        except ConfigError as error:
            logger.info("micro-batches keep their size: %s", error)
            return False
        self._comparisons.note(form_of(whole.inputs), whole.inputs)  # which has been compared
        return True

    def _kind(self, function: LossFunction) -> str:
        if why := self._gradients.why_not():
            self._refuse(why)
        if balances_experts(self._model):
            self._refuse(
                "its loss has a term that balances experts over all tokens of a micro-batch (output_router_logits), "
                "and the terms of its parts do not add up to it"
            )
        if self._reduction is not None:
            return self._reduction
        if not getattr(function, "adds_up", False):
            self._refuse(
                "nobody knows what its loss is of its samples' losses. (transformers' own loss functions add up where "
                "they divide by num_items_in_batch.) Where it is their sum, or a mean over samples or over labels that "
                'are not -100, say so with loss_reduction="sum", "mean" or "tokens"'
            )
        return "sum"

    def _pair(self, kind: str, parts: Sequence[SubMicroBatch]) -> tuple[SubMicroBatch, SubMicroBatch]:
        """Returns the neighbours whose losses count most differently, by any kind of mean if not by this one."""

        def differ(pair: tuple[SubMicroBatch, SubMicroBatch]) -> tuple[float, float]:
            one, other = self._weights(pair, kind)
            return abs(one - other), _uneven(*pair)

        return max(itertools.pairwise(parts), key=differ)

    def _part(self, whole: MicroBatch, function: LossFunction, part: SubMicroBatch, weight: float = 1.0) -> MicroBatch:
        loss = loss_run(function, self._model, part.inputs, weight)
        return MicroBatch(part.inputs, loss, whole.key, part=(part.first, part.end, part.samples))

    def _compare(
        self, kind: str, whole: MicroBatch, function: LossFunction, one: SubMicroBatch, other: SubMicroBatch
    ) -> None:
        """Compares the loss of two neighbours together with those of each: with weights of which none hides anything,
        and where that gives no numbers with the model's own."""
        with uniform_weights_filled(self._model):
            compared = self._compare_once(kind, whole, function, one, other)
        if not compared:
            self._compare_once(kind, whole, function, one, other)

    def _compare_once(
        self, kind: str, whole: MicroBatch, function: LossFunction, one: SubMicroBatch, other: SubMicroBatch
    ) -> bool:
        """Returns whether there was anything to compare."""
        runs = self._together(whole, function, one, other)
        drawn, values = library_rng_state(), ModelValues(self._model)
        counts = put_back(namespaces_of(getattr(function, "keeps", (function,)), self._model))
        with self._comparisons.forwards(), counts:
            results = self._pipeline.run(self._schedule, runs, backward=False)
        draws = not same_library_rng_state(drawn, library_rng_state())
        set_library_rng_state(drawn)
        found = torch.zeros(COMPARED + 3, dtype=torch.float64)
        if self._pipeline.has_result and all(isinstance(one, Tensor) and one.numel() == 1 for one in results):
            found[:COMPARED] = torch.stack([one.double().reshape(()) for one in results]).cpu()
            found[-1] = tolerance(torch.bfloat16 if self._in_16_bits() else results[0].dtype)
        buffers, attributes = values.restore()
        if attributes:
            logger.warning(
                "micro_batch_size=%s: a forward changes %s; that happens once for each part of a micro-batch",
                self._size,
                ", ".join(attributes),
            )
        found[-2], found[-3] = float(buffers), float(draws)
        self._pipeline.sum_over_replica(found, runs)
        together, first, second, drew, changed, allowed = found.tolist()
        if changed:
            self._refuse("its forward changes buffers (statistics of a batch norm are such)")
        if allowed == 0.0 or not math.isfinite(together):  # the step says what is wrong with the loss
            return False
        each = [
            weight * loss
            for weight, loss in zip(self._weights((one, other), kind), (first, second), strict=True)
            if weight
        ]
        if abs(together - sum(each)) > allowed * max(abs(together), *map(abs, each), 1e-30):
            random = "; it draws from Python's or numpy's generator, too" if drew else ""
            random += "" if self._reduction else ". If it is a mean of another kind, say so with loss_reduction"
            self._refuse(
                f"the loss of two parts together is {together:.8g}, and that of each {first:.8g} and {second:.8g}, of "
                f"which it should be {_MADE_OF[kind]}. What is computed of a sample depends on the others, or on "
                f"random numbers that are not drawn for each sample{random}"
            )
        return True

    def _weights(self, parts: Sequence[SubMicroBatch], kind: str) -> list[float]:
        return weights_of(parts, kind, first=int(shifts_labels(self._model)))

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"micro_batch_size={self._size}: this model's micro-batches cannot be divided, because {why}. Remove "
            "micro_batch_size; for less memory there are recompute and offload"
        )

    def _together(
        self, whole: MicroBatch, function: LossFunction, one: SubMicroBatch, other: SubMicroBatch
    ) -> list[MicroBatch]:
        """Returns two neighbours together, and each of them, as they run to be compared."""
        middle, samples = one.end - one.first, other.end - one.first

        def run(mine: Inputs, part: tuple[int, int, int]) -> MicroBatch:
            return MicroBatch(mine, loss_run(function, self._model, mine), whole.key, part=part, trains=False)

        return [
            run(part_of(whole.inputs, one.first, other.end, one.samples), (0, samples, samples)),
            run(one.inputs, (0, middle, samples)),
            run(other.inputs, (middle, samples, samples)),
        ]


def _uneven(one: SubMicroBatch, other: SubMicroBatch) -> float:
    """Returns by how much the shares of two parts differ in a mean over labels, whichever label is the first."""
    shares = (weights_of((one, other), "tokens", first=first) for first in (0, 1))
    return min(abs(mine - its) for mine, its in shares)


_TELLING = 5e-4
"""Half of how unevenly labels must be spread over two parts to tell a mean over labels from another."""
_MADE_OF = {"sum": "the sum", "mean": "the mean over samples", "tokens": "the mean over labels that are not -100"}
"""By `loss_reduction`."""
