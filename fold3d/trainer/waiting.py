"""Waiting: micro-batches that wait for the last one of their optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from fold3d.errors import ConfigError
from fold3d.stage.replay import PlainAttributes
from fold3d.stage.users_state import Contents
from fold3d.trace.state import ABSENT, OTHER, Position, same

_PLACE = "fold3d: place in the step"
"""Key of a micro-batch by which what it was drawn with is found; taken out before the loss function sees it."""

Divisors = tuple[Any, int]
"""(num_items_in_batch, gradient accumulation steps) of the stock loop: what a micro-batch's loss is divided by."""

Place = tuple[int, str]
"""The number of a module, as `Module.modules` yields them, and the name of an attribute."""
Drawn = tuple[Divisors, dict[str, Any], dict[Place, Any]]
"""What a micro-batch was drawn with: its divisors, and attributes of the trainer and of the model's modules that differ
between micro-batches."""


class ModelThen:
    """Plain attributes of a model's modules, and which weights are trained, when a micro-batch was drawn."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = PlainAttributes(model, dict(enumerate(model.modules()))).values
        self._trained = [parameter.requires_grad for parameter in model.parameters()]

    def changed(self, before: ModelThen) -> set[Place]:
        """Returns which attributes are others than they were.

        Raises: ConfigError where other weights are trained, or where one is an iterator that cannot be put back.
        """
        if self._trained != before._trained:
            raise ConfigError(
                "training_step or _prepare_inputs changes requires_grad of weights (a frozen layer, an adapter that is "
                "switched on) between the micro-batches of a step, and all of them run behind the last one: do it in "
                "on_step_begin, or set gradient_accumulation_steps=1"
            )
        found: set[Place] = set()
        for number, values in self._attributes.items():
            then = before._attributes[number]
            for name in values.keys() | then.keys():
                one, other = then.get(name, ABSENT), values.get(name, ABSENT)
                if one is OTHER or other is OTHER or same(one, other):
                    continue
                if isinstance(one, Position) or isinstance(other, Position):
                    raise ConfigError(
                        f"training_step or _prepare_inputs takes the next of the model's iterator {name!r} between the "
                        "micro-batches of a step, and it cannot be put back for the loss functions, which run behind "
                        "the last one: draw in the data collator, or set gradient_accumulation_steps=1"
                    )
                found.add((number, name))
        return found

    def value(self, place: Place) -> Any:
        """Returns an attribute; ABSENT where there was none."""
        return self._attributes[place[0]].get(place[1], ABSENT)


@dataclass
class Waiting:
    """The micro-batches of the optimizer step to come.

    Mostly all were drawn together and have the same divisors. Where a pass over a data set without a length ends within
    a step, the stock Trainer keeps the gradients of its last micro-batches for the first step of the next pass; so
    those micro-batches wait here, with the divisors they were drawn with. So do attributes of the trainer, and of the
    model's modules, that the user's `training_step` or `_prepare_inputs` sets for each of them: the loss functions run
    behind the last one.
    """

    _inputs: list[dict[str, Any]] = field(default_factory=list)
    _divisors: list[Divisors] = field(default_factory=list)
    _attributes: list[tuple[Contents, dict[str, Any]]] = field(default_factory=list)
    _models: list[ModelThen] = field(default_factory=list)
    added: int = 0
    """How many have ever waited."""

    def add(
        self, inputs: dict[str, Any], divisors: Divisors, attributes: Contents | None, model: ModelThen | None = None
    ) -> int:
        """Keeps a micro-batch; returns how many wait.

        Args:
            attributes: of the trainer; None where the user's code sets none before the loss function.
            model: its attributes; None likewise.
        """
        self.added += 1
        self._inputs.append(inputs)
        self._divisors.append(divisors)
        if attributes is not None:
            self._attributes.append((attributes, attributes.copies()))
        if model is not None:
            self._models.append(model)
        return len(self._inputs)

    def clear(self) -> None:
        """Forgets all of them."""
        self._inputs, self._divisors, self._attributes, self._models = [], [], [], []

    def take(self) -> tuple[list[dict[str, Any]], Callable[[dict[str, Any]], Drawn], bool]:
        """Returns the micro-batches, which wait no longer; what finds what each, or a copy of it, was drawn with; and
        whether attributes of the model differ.

        It must be asked before the micro-batch is used. Raises: ConfigError where other weights are trained.
        """
        inputs, divisors, attributes, models = self._inputs, self._divisors, self._attributes, self._models
        self.clear()
        names = {name for (then, _), (one, _) in pairwise(attributes) for name in one.changed(then)}
        places = {place for then, one in pairwise(models) for place in one.changed(then)}
        if not names | places and all(one[0] is divisors[0][0] and one[1] == divisors[0][1] for one in divisors):
            return inputs, lambda _: (divisors[0], {}, {}), False
        own = [{name: copies[name] for name in names & copies.keys()} for _, copies in attributes] or [{}] * len(inputs)
        of_model = [{place: one.value(place) for place in places} for one in models] or [{}] * len(inputs)
        drawn = list(zip(divisors, own, of_model, strict=True))
        placed = [{**one, _PLACE: place} for place, one in enumerate(inputs)]
        return placed, lambda batch: drawn[batch.pop(_PLACE)], bool(places)
