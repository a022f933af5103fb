"""Waiting: micro-batches that wait for the last one of their optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fold3d.stage.users_state import Contents

_PLACE = "fold3d: place in the step"
"""Key of a micro-batch by which what it was drawn with is found; taken out before the loss function sees it."""

Divisors = tuple[Any, int]
"""(num_items_in_batch, gradient accumulation steps) of the stock loop: what a micro-batch's loss is divided by."""

Drawn = tuple[Divisors, dict[str, Any]]
"""What a micro-batch was drawn with: its divisors, and attributes of the trainer that differ between micro-batches."""


@dataclass
class Waiting:
    """The micro-batches of the optimizer step to come.

    Mostly all were drawn together and have the same divisors. Where a pass over a data set without a length ends within
    a step, the stock Trainer keeps the gradients of its last micro-batches for the first step of the next pass; so
    those micro-batches wait here, with the divisors they were drawn with. So do attributes of the trainer that the
    user's `training_step` or `_prepare_inputs` sets for each of them: the loss functions run behind the last one.
    """

    _inputs: list[dict[str, Any]] = field(default_factory=list)
    _divisors: list[Divisors] = field(default_factory=list)
    _attributes: list[tuple[Contents, dict[str, Any]]] = field(default_factory=list)
    added: int = 0
    """How many have ever waited."""

    def add(self, inputs: dict[str, Any], divisors: Divisors, attributes: Contents | None) -> int:
        """Keeps a micro-batch; returns how many wait.

        Args:
            attributes: of the trainer; None where the user's code sets none before the loss function.
        """
        self.added += 1
        self._inputs.append(inputs)
        self._divisors.append(divisors)
        if attributes is not None:
            self._attributes.append((attributes, attributes.copies()))
        return len(self._inputs)

    def clear(self) -> None:
        """Forgets all of them."""
        self._inputs, self._divisors, self._attributes = [], [], []

    def take(self) -> tuple[list[dict[str, Any]], Callable[[dict[str, Any]], Drawn]]:
        """Returns the micro-batches, which wait no longer, and what finds what each, or a copy of it, was drawn with.

        It must be asked before the micro-batch is used.
        """
        inputs, divisors, attributes = self._inputs, self._divisors, self._attributes
        self.clear()
        pairs = zip(attributes[1:], attributes, strict=False)
        names = {name for (one, _), (then, _) in pairs for name in one.changed(then)}
        if not names and all(one[0] is divisors[0][0] and one[1] == divisors[0][1] for one in divisors):
            return inputs, lambda _: (divisors[0], {})
        own = [{name: copies[name] for name in names & copies.keys()} for _, copies in attributes] or [{}] * len(inputs)
        drawn = list(zip(divisors, own, strict=True))
        placed = [{**one, _PLACE: place} for place, one in enumerate(inputs)]
        return placed, lambda batch: drawn[batch.pop(_PLACE)]
