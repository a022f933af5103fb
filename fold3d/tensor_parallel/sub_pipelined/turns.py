"""Turns: two functions take turns on one thread, each going on while what the other has sent is on its way."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import greenlet
import torch

from fold3d.tensor_parallel.sub_pipelined.thread_state import ThreadState, switched

T = TypeVar("T")


class Carried(Protocol):
    """Holds something of the function that runs, which another one must not see."""

    def put_aside(self) -> Any:
        """Returns what it holds of the function that stops, and holds nothing from now on."""

    def take_up(self, state: Any) -> None:
        """Holds again what `put_aside` returned."""


class Turns:
    """Runs functions in greenlets that hand over to each other when they wait (Merak, section 5.3: sub-pipelined
    tensor model parallelism; here the model's own code runs, which knows nothing of it).

    One thread; no function runs while another one does. The order of turns is round and round, so it follows from
    what the functions do and never from time: ranks that run the same functions communicate in the same order.
    """

    def __init__(self) -> None:
        self._hub: Any = None
        self._alive = 0
        self._state: Callable[[], Callable[[], None]] = lambda: lambda: None
        self.current: int | None = None
        """Number of the function that runs; None outside of `run`."""

    def run(
        self, functions: Sequence[Callable[[], T]], carried: Sequence[Carried], generators: Sequence[torch.Generator]
    ) -> list[T]:
        """Returns what each function returned.

        Args:
            carried: what holds something of the function that runs.
            generators: of random numbers; each function begins with their present states, which they have again at the
                end.
        Raises: what a function raises; the others are ended where they wait.
        """
        if self._hub is not None:
            raise RuntimeError("functions that take turns cannot have functions of their own take turns")

        def put_aside() -> Callable[[], None]:
            modes, states = ThreadState(generators), [(one, one.put_aside()) for one in carried]

            def take_up() -> None:
                modes.restore()
                for one, state in states:
                    one.take_up(state)

            return take_up

        self._hub, self._state, self._alive = greenlet.getcurrent(), put_aside, len(functions)
        results: list[Any] = [None] * len(functions)
        # What each begins with; the hub itself keeps nothing but this.
        begin = put_aside()

        def body(number: int) -> Callable[[], None]:
            def run() -> None:
                begin()
                try:
                    results[number] = functions[number]()
                finally:
                    self._alive -= 1

            return run

        members = [greenlet.greenlet(body(number), parent=self._hub) for number in range(len(functions))]
        for member in members:
            member.gr_context = contextvars.copy_context()
        try:
            while not all(member.dead for member in members):
                for number, member in enumerate(members):
                    if not member.dead:
                        self.current = number
                        switched(member.switch)
        finally:
            self._alive = 0  # nobody hands over any more
            for number, member in enumerate(members):
                if not member.dead and member:
                    self.current = number
                    switched(member.throw, greenlet.GreenletExit)
            self._hub = self.current = None
            begin()
        return results

    def hand_over(self) -> None:
        """Lets the others run up to their next wait; returns at once outside of `run`, and for the last one left."""
        if self._alive < 2 or self.current is None:
            return
        me, take_up = self.current, self._state()
        try:
            switched(self._hub.switch)
        finally:  # also where another function has failed: this one's context managers end in the modes they began in
            self.current = me
            take_up()
