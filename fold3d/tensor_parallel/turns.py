"""Turns: two functions take turns on one thread, each going on while what the other has sent is on its way;
ThreadState: what torch keeps per thread, of which each needs its own.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import greenlet
import torch

from fold3d._C import swap_operator_run, swap_warning_handler
from fold3d.torch_private import Depth, put_modes_on, take_modes_off

T = TypeVar("T")


class Switches:
    """Grad mode and autocast of this thread, which are no stacks.

    Args:
        kinds: of devices besides the CPU.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", *kinds))
        ]
        self._cached, self._nesting = torch.is_autocast_cache_enabled(), _nesting()

    def restore(self, *, grad: bool = True) -> None:
        """Makes them what they were; `grad`: grad mode, too."""
        if grad:
            torch._C._set_grad_enabled(self.grad)
        ended = False
        for kind, enabled, dtype in self._autocast:
            ended = ended or (torch.is_autocast_enabled(kind) and not enabled)
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        for _ in range(self._nesting - _nesting()):
            torch.autocast_increment_nesting()
        for _ in range(_nesting() - self._nesting):
            torch.autocast_decrement_nesting()
        if ended:  # as at the end of autocast: a weight in 16 bits may have been made without a graph
            torch.clear_autocast_cache()


class ThreadState:
    """The modes of this thread as they are now: grad mode, autocast, hooks for saved tensors, function and dispatch
    modes, the states of random generators, and where operators are noted.

    Without the hooks a checkpoint that another function has begun would take this one's tensors; without the generators
    it would draw other masks when it runs again.
    """

    def __init__(
        self, generators: Sequence[torch.Generator], *, kinds: Sequence[str] = (), above: Depth | None = None
    ) -> None:
        """Takes the modes off: hooks, function and dispatch modes are gone from the thread until `restore` or `add`.

        Args:
            kinds: of devices, besides those of the generators, whose autocast counts.
            above: those that were there before stay, and are none of this state's; None: there are none.
        """
        self.switches = Switches([*kinds, *(generator.device.type for generator in generators)])
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._modes = take_modes_off(above or Depth())
        self._operators = swap_operator_run(None)

    def restore(self) -> None:
        """Makes the thread's modes what they were; what others have left on the thread is taken off."""
        take_modes_off(Depth())
        self.add()
        self.switches.restore()
        swap_operator_run(self._operators)

    def add(self, *, generators: bool = True) -> Depth:
        """Puts hooks, function and dispatch modes on top of those that the thread has, and gives the random generators
        the states they had, unless `generators` is False; returns what `take_modes_off` takes."""
        above = Depth.now()
        put_modes_on(self._modes)
        for generator, state in self._generators if generators else ():
            generator.set_state(state)
        return above


def switched(switch: Callable[..., T], *args: Any) -> T:
    """Returns what `switch` returns for `args`, which has another greenlet run. That one warns on its own.

    Calls of torch's C++ that are under way keep the thread's handler of warnings on their part of the stack. With
    another greenlet on the stack that is memory of other things: a warning of torch's would end the process.
    """
    mine = swap_warning_handler(0)
    try:
        return switch(*args)
    finally:
        swap_warning_handler(mine)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


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
