"""GradientStates: where a step's gradients are, and what may happen to them next. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class State(Enum):
    """Where the gradients of a rank's step are, with several replicas."""

    IDLE = "no step's gradients are here"
    ACCUMULATING = "backwards add to the gradients"
    SUMMING = "the gradients are on their way to their sums"
    SHOWN = "the mean gradients are in .grad, for the optimizer"
    LEFT = "the mean gradients are left in .grad until the next step"
    CLOSED = "the engine is closed"


class Event(Enum):
    """What is done with them."""

    ATTACH = "an optimizer is attached"
    BEGIN = "a step begins"
    HAND_OVER = "all backwards are done"
    MEASURE = "their norm is asked for"
    SHOW = "they are put into .grad for whoever reads or changes them"
    LEAVE = "they are put into .grad, where no optimizer takes them"
    TAKE = "the optimizer takes them"
    DROP = "they are dropped"
    CLOSE = "the engine is closed"


_ALLOWED: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.IDLE, Event.ATTACH): State.IDLE,
        (State.LEFT, Event.ATTACH): State.IDLE,
        (State.IDLE, Event.BEGIN): State.ACCUMULATING,
        (State.LEFT, Event.BEGIN): State.ACCUMULATING,
        (State.ACCUMULATING, Event.HAND_OVER): State.SUMMING,
        (State.SUMMING, Event.MEASURE): State.SUMMING,
        (State.SUMMING, Event.SHOW): State.SHOWN,
        (State.SUMMING, Event.LEAVE): State.LEFT,
        (State.SUMMING, Event.TAKE): State.IDLE,
        (State.SHOWN, Event.TAKE): State.LEFT,
        (State.ACCUMULATING, Event.DROP): State.IDLE,
        (State.SUMMING, Event.DROP): State.IDLE,
        (State.SHOWN, Event.DROP): State.IDLE,
    }
    | {(state, Event.CLOSE): State.CLOSED for state in State}
)


class WrongOrderError(RuntimeError):
    """Something was done with a step's gradients that cannot be done where they are."""


class GradientStates:
    """The state, changed by events only."""

    def __init__(self) -> None:
        self._state = State.IDLE

    @property
    def state(self) -> State:
        """Where the gradients are now."""
        return self._state

    def allows(self, event: Event) -> bool:
        """Whether the event may come now."""
        return (self._state, event) in _ALLOWED

    def on(self, event: Event) -> None:
        """The event comes. Raises WrongOrderError, with nothing changed, where it may not."""
        after = _ALLOWED.get((self._state, event))
        if after is None:
            raise WrongOrderError(
                f"DP.sync: {event.name} ({event.value}) cannot come in state {self._state.name} ({self._state.value})"
            )
        self._state = after

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are here that neither an optimizer has taken nor anybody dropped."""
        return self._state in (State.ACCUMULATING, State.SUMMING, State.SHOWN)

    @property
    def in_grad(self) -> bool:
        """Whether the mean gradients are in `.grad`."""
        return self._state in (State.SHOWN, State.LEFT)
