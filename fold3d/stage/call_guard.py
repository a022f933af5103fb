"""CallGuard: lets only those calls into a model that is cut which have been proved right for the cut."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fold3d.errors import TraceError
from fold3d.placement.layers import chunk_parameters
from fold3d.trace.arguments import Arguments, Form, ancestors, by_name, describe, form_of
from fold3d.trace.capture import trace_call
from fold3d.trace.errors import SplitError
from fold3d.trace.model_trace import Trace

WAYS_OUT = (
    "Set pp=1 and segments=1, where nothing is cut and all outputs are there; or use fewer chunks (pp * segments), or "
    "compute it from what the model returns at its end"
)
CALLED_AGAIN = (
    "the loss function calls the model a second time for one micro-batch, and a model that is cut runs once. Put both "
    "inputs into one batch (torch.cat) and divide its outputs; let a model of its own, or a pass before training, "
    "compute what needs no gradients (a reference); or set pp=1 and segments=1, where nothing is cut"
)

CallState = tuple[str | None, int, bool]
"""The module that was entered first and has not been left, how often it was, and whether only the loss is read."""


class CallGuard:
    """Looks at every call of a model that runs chunk by chunk: how often it is called, and in which form.

    A form (see `form_of`) that was not recorded is recorded when it comes, in training and in evaluation: arguments may
    ask for outputs, or run code, for which a later chunk needs what an earlier one computed. So is a micro-batch by
    whose values the model decides otherwise than it did for those recorded (see `Decisions`).

    Args:
        is_running: whether a chunk runs.
        entered: called with the recording of the form in which the model is called, before its forward begins.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        ranges: Sequence[tuple[int, int]],
        is_running: Callable[[], bool],
        entered: Callable[[Trace], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._trace, self._ranges = trace, list(ranges)
        self._is_running, self._entered = is_running, entered
        self._known: dict[Form, list[Trace]] = {trace.form: [trace]}
        self._inside: str | None = None
        self._calls = 0
        self._only_loss = False
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Puts hooks on the model and on what holds its blocks."""
        model = self._model()
        assert model is not None
        for name in ancestors(self._trace.blocks):
            module, watch = model.get_submodule(name), _Watch(self, name)
            entered = module.register_forward_pre_hook(watch.before, prepend=True, with_kwargs=True)
            left = module.register_forward_hook(watch.after, always_call=True)
            self._undo += [entered.remove, left.remove]

    def begin(self, only_loss: bool = False) -> None:
        """A chunk begins: the model has not been called yet. `only_loss`: see `Arguments`."""
        self._inside, self._calls, self._only_loss = None, 0, only_loss

    def is_inside(self) -> bool:
        """Whether the model's own forward runs."""
        return self._inside is not None

    def put_aside(self) -> CallState:
        """Returns what the chunk has called so far, for another run of a chunk to begin."""
        state = self._inside, self._calls, self._only_loss
        self.begin()
        return state

    def take_up(self, state: CallState) -> None:
        """Goes on with what `put_aside` returned."""
        self._inside, self._calls, self._only_loss = state

    def remove(self) -> None:
        """Takes the hooks off the model."""
        while self._undo:
            self._undo.pop()()

    def entered(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Module `name`, the model or one that holds blocks, is called; returns with which keyword arguments it goes
        on."""
        if self._inside is None and self._is_running():
            self._inside = name
            return self._enter(name, args, kwargs)
        return kwargs

    def left(self, name: str) -> None:
        """Its forward has ended."""
        if self._inside == name:
            self._inside = None

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        model = self._model()
        assert model is not None
        self._calls += 1
        if self._calls > 1:
            raise SplitError(CALLED_AGAIN)
        arguments = by_name(model, name, args, kwargs).reading(self._only_loss)
        known = self._known.setdefault(form_of(arguments), [])
        found = next((one for one in known if one.decisions.hold_for(arguments)), None)
        if found is None:
            found = self._prove(model, arguments)
            known.append(found)
        elif found is not known[0]:  # the next micro-batch is likely to be like this one
            known.remove(found)
            known.insert(0, found)
        self._entered(found)
        # In evaluation models keep what the next token would need, some of them in what their blocks return.
        called = model.get_submodule(name)
        keeps = not called.training and "use_cache" in inspect.signature(called.forward).parameters
        return {**kwargs, "use_cache": False} if self._only_loss and keeps and "use_cache" not in arguments else kwargs

    def _prove(self, model: nn.Module, arguments: Arguments) -> Trace:
        """Records the call and returns the recording.

        Raises: SplitError when the chunks would not give what the model would.
        """
        try:
            with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
                found = trace_call(model, list(self._trace.modules), arguments).under(self._trace.tp)
        except TraceError as error:
            raise SplitError(f"{describe(arguments)} differs from the call that was recorded: {error}") from error
        reason = self._difference(model, found)
        if reason:
            raise SplitError(
                f"{describe(arguments)} cannot be run on this cut of the model, which was recorded without such a "
                f"call: {reason}. {WAYS_OUT}"
            )
        return found

    def _difference(self, model: nn.Module, found: Trace) -> str:
        trace, blocks = self._trace, self._trace.blocks
        if found.blocks != blocks:
            return other_blocks(blocks, found.blocks)
        for lo, _ in self._ranges[1:]:
            if found.borders[lo]:
                return f"{found.borders[lo]}, and the cut before block '{blocks[lo]}' lies between"
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names, absent = list(parameters), {n for n, p in parameters.items() if p.is_meta}.difference(found.unread)
        for chunk in range(len(self._ranges)):
            needed = set(chunk_parameters(names, found, self._ranges, chunk))
            lost = needed.difference(chunk_parameters(names, trace, self._ranges, chunk)).intersection(absent)
            if lost:
                return f"chunk {chunk} would need {sorted(lost)[0]}, which lies on another rank"
        return ""


def other_blocks(cut: Sequence[str], run: Sequence[str]) -> str:
    """Returns how the blocks that a call runs differ from those that the model is cut between."""
    always = "all micro-batches must run the same blocks (with an image in each, or in none)"
    if left_out := [block for block in cut if block not in run]:
        return f"block '{left_out[0]}' does not run in it, and {always}"
    if added := [block for block in run if block not in cut]:
        return f"block '{added[0]}' runs in it, and {always}"
    return "the blocks run in another order"


class _Watch:
    """The hooks of one module. Those of a copy of it, deep or pickled, watch nothing."""

    def __init__(self, guard: CallGuard | None, name: str) -> None:
        self._guard, self._name = guard, name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watch, (None, self._name)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return None if self._guard is None else (args, self._guard.entered(self._name, args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._guard is not None:
            self._guard.left(self._name)
