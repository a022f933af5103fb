"""CallGuard: lets only those calls into a model that is cut which have been proved right for the cut."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from fold3d.errors import WAYS_OUT, SplitError, TraceError
from fold3d.placement.layers import chunk_parameters
from fold3d.stage.loss_run import ModelCall
from fold3d.trace.arguments import Arguments, Form, by_name, describe, form_of
from fold3d.trace.capture import trace_call
from fold3d.trace.model_trace import Trace


class CallGuard:
    """Looks at every call of a model that runs chunk by chunk: in which form it comes.

    A form (see `form_of`) that was not recorded is recorded when it comes, in training and in evaluation: arguments may
    ask for outputs, or run code, for which a later chunk needs what an earlier one computed. So is a micro-batch by
    whose values the model decides otherwise than it did for those recorded (see `Decisions`).
    """

    def __init__(self, model: nn.Module, trace: Trace, ranges: Sequence[tuple[int, int]]) -> None:
        self._model = weakref.ref(model)
        self._trace, self._ranges = trace, list(ranges)
        self._known: dict[Form, list[Trace]] = {trace.form: [trace]}

    def enter(self, call: ModelCall, *, only_loss: bool) -> tuple[Trace, ModelCall]:
        """Returns the recording of the form in which the model is called, and the call as it goes on.

        Args:
            only_loss: see `Arguments`.
        Raises: SplitError when the chunks would not give what the model would.
        """
        model = self._model()
        assert model is not None
        arguments = by_name(model, *call).reading(only_loss)
        known = self._known.setdefault(form_of(arguments), [])
        found = next((one for one in known if one.decisions.hold_for(arguments)), None)
        if found is None:
            found = self._prove(model, arguments)
            known.append(found)
        elif found is not known[0]:  # the next micro-batch is likely to be like this one
            known.remove(found)
            known.insert(0, found)
        # In evaluation models keep what the next token would need, some of them in what their blocks return.
        called = model.get_submodule(call.module)
        keeps = not called.training and "use_cache" in inspect.signature(called.forward).parameters
        drops = only_loss and keeps and "use_cache" not in arguments
        return found, call._replace(kwargs={**call.kwargs, "use_cache": False}) if drops else call

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
