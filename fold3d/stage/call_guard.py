"""CallGuard: lets only those calls into a model that is cut which have been proved right for the cut."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fold3d.errors import WAYS_OUT, SplitError, TraceError
from fold3d.placement.layers import chunk_parameters
from fold3d.stage.loss_run import ModelCall
from fold3d.tensor_parallel.random_draws import RedrawError
from fold3d.trace.arguments import Arguments, Form, by_name, describe, form_of
from fold3d.trace.blocks import modules_around
from fold3d.trace.capture import trace_call
from fold3d.trace.known_values import Sizes, sizes_of, tensors_of
from fold3d.trace.model_trace import Trace
from fold3d.trace.shadow import UncopiableError
from fold3d.trace.state import PLAIN, holders

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GONE = object()
_MOST = 8
"""Values of one attribute for which calls are recorded anew."""
_MOST_EXPLAINED = 32
"""Calls without a number for a loss that are looked at: a mean over no labels is one, too."""


Values = tuple[tuple[bool, ...], tuple[tuple[int, str, Any], ...]]
"""Which modules train; the values of attributes, each with whose it is, and its name."""


class _Look:
    """Attributes of objects as they were, which are compared without a loop of Python's."""

    def __init__(self, held: Sequence[dict[str, Any]], ignored: Container[tuple[int, str]]) -> None:
        """Args:
        held: the attributes of each object.
        ignored: the number of an object, and the name of an attribute of it that is not looked at.
        """
        self._held, self._counts = held, list(map(len, held))
        found = [
            (number, name, of)
            for number, of in enumerate(held)
            for name in of
            if name not in _OF_EVERY_MODULE and (number, name) not in ignored
        ]
        # Tensors that objects keep are not kept alive here, so of what is no plain value only the kind is compared.
        plain = [one for one in found if type(one[2][one[1]]) in PLAIN]
        other = [one for one in found if type(one[2][one[1]]) not in PLAIN]
        self._names, self._of = [name for _, name, _ in plain], [of for *_, of in plain]
        self._other_names, self._other_of = [name for _, name, _ in other], [of for *_, of in other]
        self._before = list(map(dict.get, self._of, self._names))
        self.values = tuple((number, name, of[name]) for number, name, of in plain)
        """The plain ones."""

    def holds(self) -> bool:
        """Whether nothing has changed since: the same objects, so a number that was set again may count as changed."""
        now = map(dict.get, self._of, self._names, itertools.repeat(_GONE))
        return (
            list(map(len, self._held)) == self._counts
            and all(map(operator.is_, now, self._before))
            and PLAIN.isdisjoint(map(type, map(dict.get, self._other_of, self._other_names)))
        )


class Settings:
    """By what a model's code around its blocks may decide besides its arguments: which modules train, and attributes
    that are numbers, texts or None, of modules and of objects that they hold, such as `config`.

    What forwards change themselves, a counter say, is left out, and what has too many values.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        around = modules_around(model, blocks)
        self._modules = [module for _, module in around]
        self._held = [vars(one) for one in holders(around).values() if hasattr(one, "__dict__")]
        self._ignored: set[tuple[int, str]] = set()
        self._changes: Counter[tuple[int, str]] = Counter()
        self._last: tuple[Values, _Look] | None = None

    def now(self, *, trains: bool = False) -> Values:
        """Returns them: the same object as the call before, where nothing has changed since.

        Args:
            trains: as if all modules did.
        """
        trained = tuple(trains or module.training for module in self._modules)
        if self._last is not None:
            values, look = self._last
            if values[0] == trained and look.holds():
                return values
        look = _Look(self._held, self._ignored)
        self._last = (trained, look.values), look
        return self._last[0]

    def ignore(self, before: Values, now: Values) -> bool:
        """A forward has changed some; returns whether it has changed any, which are left out from now on."""
        return self._leave_out(_different(before, now))

    def count(self, before: Values, now: Values) -> bool:
        """The user has changed some; returns whether any has had too many values, which is left out from now on."""
        self._changes.update(_different(before, now))
        return self._leave_out({one for one, count in self._changes.items() if count >= _MOST} - self._ignored)

    def _leave_out(self, some: set[tuple[int, str]]) -> bool:
        if some:
            self._ignored |= some
            self._last = None
        return bool(some)

    def left(self, values: Values) -> Values:
        """Returns those of `values` that are not left out."""
        return values[0], tuple(one for one in values[1] if one[:2] not in self._ignored)


def _different(one: Values, other: Values) -> set[tuple[int, str]]:
    return set() if one[1] == other[1] else {(number, name) for number, name, _ in set(one[1]) ^ set(other[1])}


class CallGuard:
    """Looks at every call of a model that runs chunk by chunk: in which form it comes.

    A form (see `form_of`) that was not recorded is recorded when it comes, in training and in evaluation: arguments may
    ask for outputs, or run code, for which a later chunk needs what an earlier one computed. So is a call of a model
    with other `Settings`, and a micro-batch by whose values the model decides otherwise than it did for those recorded
    (see `Decisions`). By what else it may decide, sizes and what it counts, shows where it reads what chunks have left
    out: that is NaN (`explain`).
    """

    def __init__(
        self, model: nn.Module, trace: Trace, ranges: Sequence[tuple[int, int]], not_of_end: Iterable[str] = ()
    ) -> None:
        """Args:
        not_of_end: see `SplitModel`.
        """
        self._model, self._not_of_end = weakref.ref(model), frozenset(not_of_end)
        self._trace, self._ranges = trace, list(ranges)
        self._settings = Settings(model, trace.blocks)
        self._now = self._settings.now(trains=True)
        self._known: dict[Values, dict[Form, list[Trace]]] = {}
        self._forms = self._known.setdefault(self._now, {trace.form: [trace]})
        """Of the settings of now."""
        self._explained: set[tuple[Form, Sizes]] = set()

    def enter(self, call: ModelCall, *, only_loss: bool, looked: list[Any] | None = None) -> tuple[Trace, ModelCall]:
        """Returns the recording of the form in which the model is called, and the call as it goes on.

        Args:
            only_loss: see `Arguments`.
            looked: kept with the call by whoever has the call come again, for each chunk: then only the settings are
                looked at anew.
        Raises: SplitError when the chunks would not give what the model would.
        """
        model = self._model()
        assert model is not None
        now = self._settings.now()
        if now is not self._now:
            self._now, self._forms = now, self._known.setdefault(now, {})
        if looked and looked[0] is self and looked[1] is now:
            return looked[2], looked[3]
        arguments = by_name(model, *call).reading(only_loss)
        form = form_of(arguments)
        known = self._forms.setdefault(form, [])
        found = next((one for one in known if one.decisions.hold_for(arguments)), None)
        if found is None:
            found = self._prove(model, arguments, form)
            known.append(found)
            before = next((of for of, forms in self._known.items() if form in forms and of[1] != now[1]), now)
            if self._settings.count(before, now):
                self._forget()
        elif found is not known[0]:  # the next micro-batch is likely to be like this one
            known.remove(found)
            known.insert(0, found)
        # In evaluation models keep what the next token would need, some of them in what their blocks return.
        called = model.get_submodule(call.module)
        keeps = not called.training and "use_cache" in inspect.signature(called.forward).parameters
        drops = only_loss and keeps and "use_cache" not in arguments
        goes_on = call._replace(kwargs={**call.kwargs, "use_cache": False}) if drops else call
        if looked is not None:
            looked[:] = self, self._now, found, goes_on
        return found, goes_on

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around the forward that `enter` has let in: attributes that it changes are its own matter."""
        before = self._now
        try:
            yield
        finally:
            if self._settings.ignore(before, self._settings.now()):
                self._forget()

    def _forget(self) -> None:
        """Some settings are left out from now on."""
        known, self._known = self._known, {}
        for values, forms in known.items():
            left = self._known.setdefault(self._settings.left(values), {})
            for form, traces in forms.items():
                left.setdefault(form, []).extend(traces)
        self._now = self._settings.now()
        self._forms = self._known.setdefault(self._now, {})

    def explain(self, call: ModelCall | None, *, only_loss: bool, head: bool) -> None:
        """The loss of a call is NaN. Raises: SplitError where that is because the model has read what its chunks leave
        out, and has not read in the call that was recorded.

        Args:
            head: whether what lies behind the last block has run apart from the blocks.
        """
        model = self._model()
        cuts = [*(lo for lo, _ in self._ranges[1:]), *([len(self._trace.blocks)] if head else [])]
        if model is None or call is None or not cuts:
            return
        arguments = by_name(model, *call).reading(only_loss)
        form = form_of(arguments)
        key = form, sizes_of(tensors_of(arguments))
        if key in self._explained or len(self._explained) == _MOST_EXPLAINED:
            return
        self._explained.add(key)
        used, _ = self.enter(call, only_loss=only_loss)
        found = self._prove(model, arguments, form)
        for cut in cuts:
            known = {value for one in used.crossing(cut) for value in one.values}
            more = [value for one in found.crossing(cut) for value in one.values if value not in known]
            if more:
                raise SplitError(
                    f"the loss of {describe(arguments)} is not a number: with these sizes, or by what it counts, the "
                    f"model takes another way than in the call that was recorded. It reads what '{more[0].module}' "
                    f"returned behind block '{self._trace.blocks[cut - 1]}', where the model is cut. {WAYS_OUT}"
                    + ("; with tp_overlap='sub' behind the last block, too" if cut == len(self._trace.blocks) else "")
                )

    def _prove(self, model: nn.Module, arguments: Arguments, form: Form) -> Trace:
        """Records the call and returns the recording.

        Raises: SplitError when the chunks would not give what the model would; RedrawError where it is one of a part,
            of which the model draws random numbers that cannot be divided.
        """
        try:
            with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
                found = trace_call(model, list(self._trace.modules), arguments, as_it_is=True).under(self._trace.tp)
        except TraceError as error:
            if isinstance(error.__cause__, RedrawError):
                raise error.__cause__ from None  # a part's draws: whoever runs parts then runs the whole
            known = [one for forms in self._known.values() for one in forms.get(form, [])]
            alike = next((one for one in known if one.decisions.hold_for(arguments)), None)
            # Kernels of evaluation cannot be recorded, nor can a model that holds on to a graph.
            if alike is not None and (isinstance(error, UncopiableError) or not all(self._now[0])):
                return alike
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
        if changed := self._not_of_end.intersection(found.behind):
            return (
                f"it changes the buffer '{min(changed)}' behind the blocks, and another stage than the last one saves "
                "it; pass an `example` that does so, too"
            )
        return ""


def other_blocks(cut: Sequence[str], run: Sequence[str]) -> str:
    """Returns how the blocks that a call runs differ from those that the model is cut between."""
    always = "all micro-batches must run the same blocks (with an image in each, or in none)"
    if left_out := [block for block in cut if block not in run]:
        return f"block '{left_out[0]}' does not run in it, and {always}"
    if added := [block for block in run if block not in cut]:
        return f"block '{added[0]}' runs in it, and {always}"
    return "the blocks run in another order"
