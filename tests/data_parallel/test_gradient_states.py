"""GradientStates against a model of a few flags, in any order of events."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import sampled_from

from fold3d.data_parallel.gradient_states import Event, GradientStates, State, WrongOrderError


class Flags(RuleBasedStateMachine):
    """What an engine knows of a step's gradients, as flags; every event comes at every time."""

    def __init__(self) -> None:
        super().__init__()
        self.states = GradientStates()
        self.begun = self.handed_over = self.in_grad = self.closed = False

    def may(self, event: Event) -> bool:
        """Whether the flags allow the event."""
        if self.closed:
            return event is Event.CLOSE
        here = self.begun and self.handed_over
        return {
            Event.ATTACH: not self.begun,
            Event.BEGIN: not self.begun,
            Event.HAND_OVER: self.begun and not self.handed_over,
            Event.MEASURE: here and not self.in_grad,
            Event.SHOW: here and not self.in_grad,
            Event.LEAVE: here and not self.in_grad,
            Event.TAKE: here,
            Event.DROP: self.begun,
            Event.CLOSE: True,
        }[event]

    @rule(event=sampled_from(Event))
    def event_comes(self, event: Event) -> None:
        self.come(event)

    @rule()
    def a_step(self) -> None:
        """The usual order, from wherever that can begin."""
        for event in (Event.BEGIN, Event.HAND_OVER, Event.MEASURE, Event.TAKE):
            self.come(event)

    def come(self, event: Event) -> None:
        """Tells both; the machine refuses what the flags do, and then stays as it was."""
        allowed, before = self.may(event), self.states.state
        assert self.states.allows(event) is allowed
        if not allowed:
            with pytest.raises(WrongOrderError, match=rf"{event.name} .*in state {before.name} "):
                self.states.on(event)
            assert self.states.state is before
            return
        self.states.on(event)
        if event is Event.BEGIN:
            self.begun, self.handed_over, self.in_grad = True, False, False
        elif event is Event.HAND_OVER:
            self.handed_over = True
        elif event is Event.SHOW:
            self.in_grad = True
        elif event is Event.LEAVE:
            self.begun, self.in_grad = False, True
        elif event is Event.TAKE:
            self.begun = False
        elif event is Event.DROP:
            self.begun = self.in_grad = False
        elif event is Event.ATTACH:
            self.in_grad = False
        elif event is Event.CLOSE:
            self.closed = True

    @invariant()
    def they_agree(self) -> None:
        states = self.states
        assert (states.state is State.CLOSED) is self.closed
        if self.closed:
            assert not states.has_gradients
            return
        assert states.has_gradients is self.begun
        assert states.in_grad is self.in_grad
        assert (states.state is State.ACCUMULATING) is (self.begun and not self.handed_over)


TestFlags = Flags.TestCase


def test_every_state_can_be_reached_and_left() -> None:
    seen, todo = {State.IDLE}, [[]]  # type: ignore[var-annotated]
    while todo:
        path = todo.pop(0)
        for event in Event:
            states = GradientStates()
            for earlier in path:
                states.on(earlier)
            if states.allows(event):
                states.on(event)
                if states.state not in seen:
                    seen.add(states.state)
                    todo.append([*path, event])
    assert seen == set(State)
