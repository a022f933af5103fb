"""Waiting: micro-batches that wait for the last one of their optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_PLACE = "fold3d: place in the step"
"""Key of a micro-batch by which its divisors are found; taken out before the loss function sees the micro-batch."""

Divisors = tuple[Any, int]
"""(num_items_in_batch, gradient accumulation steps) of the stock loop: what a micro-batch's loss is divided by."""


@dataclass
class Waiting:
    """The micro-batches of the optimizer step to come.

    Mostly all were drawn together and have the same divisors. Where a pass over a data set without a length ends within
    a step, the stock Trainer keeps the gradients of its last micro-batches for the first step of the next pass; so
    those micro-batches wait here, with the divisors they were drawn with.
    """

    _inputs: list[dict[str, Any]] = field(default_factory=list)
    _divisors: list[Divisors] = field(default_factory=list)
    added: int = 0
    """How many have ever waited."""

    def add(self, inputs: dict[str, Any], divisors: Divisors) -> int:
        """Keeps a micro-batch; returns how many wait."""
        self.added += 1
        self._inputs.append(inputs)
        self._divisors.append(divisors)
        return len(self._inputs)

    def clear(self) -> None:
        """Forgets all of them."""
        self._inputs, self._divisors = [], []

    def take(self) -> tuple[list[dict[str, Any]], Callable[[dict[str, Any]], Divisors]]:
        """Returns the micro-batches, which wait no longer, and what finds the divisors of each, or of a copy of it.

        It must be asked before the micro-batch is used.
        """
        inputs, divisors = self._inputs, self._divisors
        self.clear()
        if all(one[0] is divisors[0][0] and one[1] == divisors[0][1] for one in divisors):
            return inputs, lambda _: divisors[0]
        placed = [{**one, _PLACE: place} for place, one in enumerate(inputs)]
        return placed, lambda batch: divisors[batch.pop(_PLACE)]
