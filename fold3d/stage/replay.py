"""What a run of a chunk finds again that repeats another: buffers, plain attributes, random numbers of libraries. What
the first run changed changes once per micro-batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fold3d.device import LibraryState, library_rng_state, same_library_rng_state, set_library_rng_state
from fold3d.errors import SplitError
from fold3d.torch_private import version_of
from fold3d.trace.state import (
    ABSENT,
    CONTAINERS,
    MOST_COPIED,
    OF_EVERY_MODULE,
    OTHER,
    PLAIN,
    HeldObjects,
    Position,
    attributes_of,
    holders,
    is_users_object,
    plain,
    same,
    set_attribute,
)


class ModelValues:
    """Buffers and plain attributes of a model at the time this is made, for a run that shall leave no traces."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._holders = holders(model.named_modules())
        self._attributes = PlainAttributes(model, self._holders)
        self._buffers = [(module, name, one) for module in self._modules for name, one in module._buffers.items()]
        tensors = [one for _, _, one in self._buffers]
        tensors += [
            one for held in self._attributes.values.values() for one in held.values() if isinstance(one, Tensor)
        ]
        self._values = [(one, one.detach().clone()) for one in tensors if one is not None and not one.is_meta]

    def restore(self) -> tuple[bool, list[str]]:
        """Makes all what they were; returns whether a tensor has changed meanwhile, and names of other attributes that
        have."""
        changed = [(one, value) for one, value in self._values if not torch.equal(one, value)]
        moved = [place for place in self._buffers if place[0]._buffers.get(place[1]) is not place[2]]
        for one, value in changed:
            one.data.copy_(value)
        for module, name, buffer in moved:
            module._buffers[name] = buffer
        attributes = list(self._attributes.changed())
        shared: dict[int, Any] = {}  # what several have is one copy
        for path, name, value, _ in attributes:
            own = attributes_of(self._holders[path]).get(name, ABSENT)
            is_shared = type(own) is type(value) and type(value) not in PLAIN
            _put(self._holders[path], False, name, shared.setdefault(id(own), value) if is_shared else value)
        names = dict.fromkeys(f"{type(self._holders[path]).__name__}.{name}" for path, name, _, _ in attributes)
        return bool(changed or moved), list(names)


@contextlib.contextmanager
def uniform_weights_filled(model: nn.Module) -> Iterator[None]:
    """Within, parameters and buffers whose elements are all equal have different ones, of the same sign, the same on
    all ranks: a gate that begins at zero hides what is behind it, and what that does to its gradient."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            value = parameter.data
            if type(value) is not Tensor or value.is_meta or not value.is_floating_point() or parameter.is_inference():
                continue
            if value.numel() == 0 or value.element_size() == 1:
                continue
            least, most = value.aminmax()
            if bool(least == most):
                draw = torch.Generator().manual_seed(sum(map(ord, name)))
                factors = (torch.rand(value.shape, generator=draw) + 0.5).to(value)
                before.append((parameter, value))
                parameter.data = torch.where(value == 0, 0.5, value) * factors
        yield
    finally:
        for parameter, value in before:
            parameter.data = value


class PlainAttributes:
    """Attributes of some modules and objects at the time this is made: numbers, text, None, tensors without a gradient,
    and lists, dictionaries, sets and tuples of them."""

    def __init__(self, model: nn.Module, held_by: Mapping[Any, object]) -> None:
        self._model, self._holders = model, held_by
        self._next_hook = RemovableHandle.next_id
        self.values = {key: _plain_attributes_of(holder) for key, holder in held_by.items()}

    def changed(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """Yields key of the holder, name, value then (or ABSENT) and now of those that are others by now.

        Without the flag that says that hooks have been registered, which must stay as they do: what was absent, None
        or False where a module has a new hook. transformers' models register them when hidden states are first asked
        for, and would do so again.
        """
        has_hook: bool | None = None
        for key, known in self.values.items():
            held = attributes_of(self._holders[key])
            for name in known.keys() | (held.keys() - OF_EVERY_MODULE):
                one, other = known.get(name, ABSENT), held.get(name, ABSENT)
                if one is other or one is OTHER or same(one, other) or (now := plain(other)) is OTHER:
                    continue
                if type(one) is Position and not (type(now) is Position and now.iterator is one.iterator):
                    continue  # nobody takes the next of that one again
                if one is ABSENT or one is None or one is False:
                    has_hook = self._has_new_hook() if has_hook is None else has_hook
                    if has_hook:
                        continue
                yield key, name, one, now

    def _has_new_hook(self) -> bool:
        return RemovableHandle.next_id > self._next_hook and any(
            key >= self._next_hook
            for module in self._model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            for key in hooks
        )


def _values_of(holder: Any, is_buffer: bool) -> dict[str, Any]:
    return holder._buffers if is_buffer else attributes_of(holder)


def _put(holder: Any, is_buffer: bool, name: str, value: Any) -> None:
    if type(value) is Position:
        raise SplitError(
            f"the model's forward takes the next of '{name}' (of {type(holder).__name__}), a "
            f"{type(value.iterator).__name__}, which cannot be put back, and it runs several times with a micro-batch: "
            "keep an index or an itertools.count there, or draw in the data collator; or set pp=1, segments=1 and "
            'recompute="none"'
        )
    if not is_buffer:
        set_attribute(holder, name, value)
    elif value is ABSENT:
        holder._buffers.pop(name, None)
    else:
        holder._buffers[name] = value


def _plain_attributes_of(holder: object) -> dict[str, Any]:
    return {
        name: value if type(value) in PLAIN else plain(value)  # written out: there are many of them
        for name, value in attributes_of(holder).items()
        if name not in OF_EVERY_MODULE
    }


class StatePlace(NamedTuple):
    """Where a value is kept."""

    holder: int
    """Number among the modules and objects that are looked at."""
    name: str
    is_buffer: bool
    """Whether it is a buffer there, or an attribute."""


class _Change(NamedTuple):
    """Of an attribute: what it was before the first run, and behind it."""

    before: Any
    after: Any


class Before(dict[StatePlace, Any]):
    """Of one micro-batch: what its runs changed, and those of later ones since, as it was before they did.

    Attributes:
        afterwards: what is told of values that later micro-batches change; None: nobody asks.
    """

    afterwards: Afterwards | None = None

    def tell(self, afterwards: Afterwards | None) -> None:
        """Sets `afterwards`, unless it is None."""
        self.afterwards = afterwards or self.afterwards


class ChangedBuffers:
    """Those outside of the blocks, such as a running mean of the inputs, for a model whose code in front of the blocks
    runs for every chunk; and those of a chunk's blocks, such as a batch norm's, where its forward runs twice.

    The first run changes them. Each later one finds what that one found, in tensors and containers of its own (so what
    autograd saves of them stays valid), and leaves no traces. What a micro-batch does not change itself (a maximum, a
    mean of every other one) is kept for its later runs when a run of another micro-batch changes it.

    Of attributes numbers, text, None, tensors without a gradient, and lists, dictionaries, sets and tuples of them: a
    counter, a cache, a flag. Others stay as the last run left them, such as a loss that a layer keeps for later. So do
    hooks that a forward registers, and the flag that says so, if it was absent, False or None before: transformers'
    models do that when hidden states are first asked for, and would register them again.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], *, unseen: bool) -> None:
        """Args:
        unseen: whether code of the user's may write to a tensor without a trace, see `may_write_unseen`.
        """
        self._model = model
        inside = tuple(f"{block}." for block in blocks)
        # The forwards of torch's own modules change nothing but buffers.
        named = {name: module for name, module in model.named_modules() if module._buffers}
        for path, one in holders(model.named_modules()).items():
            if isinstance(one, nn.Module) or is_users_object(one):
                named[path] = one
        self._holders = list(named.values())
        self._modules = [one for one in self._holders if isinstance(one, nn.Module)]
        self._in_front = [not f"{path}.".startswith(inside) for path in named]
        self._watched = {
            (in_front, recomputes): [
                n for n, is_outside in enumerate(self._in_front) if (in_front, recomputes)[not is_outside]
            ]
            for in_front in (False, True)
            for recomputes in (False, True)
        }
        self._first: int | None = None
        self._changing: set[StatePlace] = set()
        self._compared: set[tuple[int, bool, tuple[bool, ...]]] = set()  # in which modes values have been compared
        self._always_compares = unseen
        self._is_users = [is_users_object(one) for one in self._holders]
        self._known = set(map(id, self._holders))
        self._held = HeldObjects((path, one) for path, one in model.named_modules() if is_users_object(one))
        self._begun: dict[int, WeakValueDictionary[int, Before]] = defaultdict(WeakValueDictionary)
        """By chunk, of the micro-batches that it has run."""
        self._has_made = False

    @contextlib.contextmanager
    def of_chunk(
        self, chunk: int, before: Before, *, recomputes: bool = False, afterwards: Afterwards | None = None
    ) -> Iterator[None]:
        """Around the run of a chunk.

        Args:
            before: of the micro-batch; what this run changes is put in.
            recomputes: the chunk will run again with this micro-batch, see `again`.
            afterwards: is told of what it has changed; None: nobody asks.
        Raises: SplitError when it writes for the first time to a large tensor, or to one of a library's module.
        """
        before.tell(afterwards)
        self._first = chunk if self._first is None else min(self._first, chunk)
        in_front = chunk == self._first
        fixed = {place: value for place, value in before.items() if self._in_front[place.holder] and not in_front}
        watched = self._watched[in_front, recomputes]
        # Kernels of batch norms change their statistics without saying so: values are compared, but only once where no
        # code of the user's can do so later, because that waits for a GPU.
        mode = (chunk, recomputes, tuple([module.training for module in self._modules]) if watched else ())
        compares = self._always_compares or mode not in self._compared
        self._compared.add(mode)
        attributes = PlainAttributes(self._model, {number: self._holders[number] for number in watched})
        then = [
            (
                place,
                tensor,
                version_of(tensor),
                _copy(tensor) if compares or self._may_change(place, tensor) else tensor,
            )
            for number, known in attributes.values.items()
            for place, tensor in self._tensors(number, known)
        ]
        inside = [
            (place, tensors, copy.deepcopy(value) if compares or self._may_change(place, *tensors) else None)
            for number, known in attributes.values.items()
            for place, value, tensors in _with_tensors(number, known)
        ]
        copied = {place: kept for place, _, kept in inside if kept is not None}
        versions = [[version_of(one) for one in tensors] for _, tensors, _ in inside]
        behind: list[StatePlace] = []
        # What one forward makes the next one may change: that shows with the next micro-batch at the latest.
        made = self._made_meanwhile() if in_front or self._has_made or chunk not in self._begun else {}
        self._has_made = bool(made)
        try:
            with self._holding(fixed, behind):
                yield
            self._refuse_changes(made)
        finally:
            if afterwards is not None:
                afterwards.leave([(self._holders[place.holder], place.name) for place in behind])
            for place, old, version, value in then:
                replaced = place.is_buffer and self._value(place) is not old
                looks = compares or place in self._changing
                written = version != version_of(old) or (looks and not _equal(value, old))
                if replaced or written:
                    self._changing.add(place)
                    if value is old and written:
                        raise self._unexpected(place)
                    self._keep(chunk, before, place, value, self._value(place), value)
            for (place, tensors, kept), before_that in zip(inside, versions, strict=True):
                copies = tensors if kept is None else _tensors_in(kept)
                if before_that == list(map(version_of, tensors)) and all(map(_equal, copies, tensors)):
                    continue
                self._changing.add(place)
                if kept is None:
                    raise self._unexpected(place)
                now = plain(self._value(place))
                now = now if now is OTHER else copy.deepcopy(now)
                self._keep(chunk, before, place, _Change(kept, now), now, kept, _Change(kept, kept))
            for number, name, value, now in attributes.changed():
                place = StatePlace(number, name, False)
                then_value = copied.get(place, value)  # with tensors that nobody writes to
                if type(now) in CONTAINERS and self._may_change(place, *_tensors_in(now)):
                    now = copy.deepcopy(now)
                self._keep(
                    chunk, before, place, _Change(then_value, now), now, then_value, _Change(then_value, then_value)
                )
            self._begun[chunk][id(before)] = before

    def _made_meanwhile(self) -> dict[int, tuple[str, object, dict[str, Any]]]:
        """Returns objects of the user's that modules hold, and did not when this was made, with their attributes."""
        return {
            id(one): (path, one, {name: plain(value, others=True) for name, value in attributes_of(one).items()})
            for path, one in self._held.now().items()
            if id(one) not in self._known and is_users_object(one)
        }

    def _refuse_changes(self, before: Mapping[int, tuple[str, object, dict[str, Any]]]) -> None:
        now = self._made_meanwhile() if before else {}
        for key, (path, one, values) in before.items():
            if key in now and not same(values, now[key][2]):
                raise SplitError(
                    f"a forward of the model has made '{path}' (of class {type(one).__name__}), and this one changes "
                    "it. Where a model is cut its forward runs several times with each micro-batch, and would change "
                    'it each time: make it in __init__, or set pp=1, segments=1 and recompute="none"'
                )

    def _keep(
        self, chunk: int, before: Before, place: StatePlace, kept: Any, now: Any, then: Any, others: Any = ABSENT
    ) -> None:
        """A run of `chunk` has changed a value.

        Args:
            before: of the run's micro-batch, for which `kept` is kept.
            now: the value; `then`: the one before.
            others: what is kept for micro-batches that have run before, and did not change it; ABSENT: `kept`.
        """
        for one in self._begun[chunk].values():
            if one is not before:
                _keep(one, self._holders[place.holder], place, kept if others is ABSENT else others, then)
        _keep(before, self._holders[place.holder], place, kept, now)

    def _may_change(self, place: StatePlace, *tensors: Tensor) -> bool:
        """Whether tensors that are kept there may be written to in the next run."""
        is_small = sum(one.numel() for one in tensors) <= MOST_COPIED
        return place in self._changing or (self._is_users[place.holder] and is_small)

    def _unexpected(self, place: StatePlace) -> SplitError:
        return SplitError(
            f"the model's forward writes to '{place.name}' (of {type(self._holders[place.holder]).__name__}), which no "
            "forward before has done, and it runs several times in this process, which would find other values there: "
            'set it to another tensor instead, or set segments=1 and recompute="none"'
        )

    @contextlib.contextmanager
    def again(self, before: Before) -> Iterator[None]:
        """Around a run of a chunk that does what its first one with the micro-batch did."""
        with self._holding(before):
            yield

    @contextlib.contextmanager
    def _holding(self, values: Mapping[StatePlace, Any], behind: list[StatePlace] | None = None) -> Iterator[None]:
        """Has the modules hold copies of `values` for a while, what several have is one copy.

        Args:
            behind: gets the attributes that stay as the run left them: code behind the blocks has changed them, too.
        """
        copies: dict[int, Any] = {}
        held: list[tuple[StatePlace, Any]] = []
        for place, kept in values.items():
            value = kept.before if isinstance(kept, _Change) else kept
            own = self._value(place)
            held.append((place, own))
            if type(value) not in PLAIN and value is not ABSENT:
                shared = id(own if type(own) is type(value) else value)
                copied = copy.deepcopy if place in self._changing else plain
                value = copies.setdefault(shared, _copy(value) if isinstance(value, Tensor) else copied(value))
            _put(self._holders[place.holder], place.is_buffer, place.name, value)
        try:
            yield
        finally:
            for place, own in held:
                kept, now = values[place], self._value(place)
                if isinstance(kept, _Change) and not (_alike(now, kept.before) or _alike(now, kept.after)):
                    if behind is not None:
                        behind.append(place)
                    continue  # what lies behind the first run's chunk has changed it, too
                _put(self._holders[place.holder], place.is_buffer, place.name, own)

    def _value(self, place: StatePlace) -> Any:
        return _values_of(self._holders[place.holder], place.is_buffer).get(place.name, ABSENT)

    def _tensors(self, number: int, attributes: Mapping[str, Any]) -> Iterator[tuple[StatePlace, Tensor]]:
        for names, is_buffer in ((getattr(self._holders[number], "_buffers", {}), True), (attributes, False)):
            for name, value in names.items():
                if isinstance(value, Tensor):
                    yield StatePlace(number, name, is_buffer), value


def _tensors_in(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def _with_tensors(number: int, attributes: Mapping[str, Any]) -> Iterator[tuple[StatePlace, Any, list[Tensor]]]:
    """Yields containers among the attributes of a holder that have tensors, and these."""
    for name, value in attributes.items():
        if type(value) in CONTAINERS and (tensors := _tensors_in(value)):
            yield StatePlace(number, name, False), value, tensors


def _keep(before: Before, holder: object, place: StatePlace, kept: Any, found: Any) -> None:
    """Puts `kept` into `before`, and has the loss function find `found`, unless there is something already."""
    before.setdefault(place, kept)
    if before.afterwards is not None:
        before.afterwards.note(holder, place.name, found, is_buffer=place.is_buffer)


class _Found(NamedTuple):
    """What a micro-batch's forward has made of a value, and who has it."""

    holder: object
    is_buffer: bool
    name: str
    value: Any

    def now(self) -> Any:
        """Returns what it is by now."""
        return _values_of(self.holder, self.is_buffer).get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """Sets it."""
        _put(self.holder, self.is_buffer, self.name, value)


class Afterwards:
    """Of one micro-batch: buffers and plain attributes that its forwards have changed, as they then were. The loss
    function may read them when forwards of other micro-batches have changed them again."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool, str], _Found] = {}
        self._left: set[tuple[int, bool, str]] = set()

    def leave(self, attributes: Iterable[tuple[object, str]]) -> None:
        """The run that ends has left these to the loss function, in place of what earlier runs made of them."""
        self._left = {(id(holder), False, name) for holder, name in attributes}

    def note(self, holder: object, name: str, value: Any, *, is_buffer: bool) -> None:
        """The first run of code that changes it has made `value` of it."""
        value = _copy(value) if isinstance(value, Tensor) else value
        self._found.setdefault((id(holder), is_buffer, name), _Found(holder, is_buffer, name, value))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Around what the loss function does behind the model's call. Raises: SplitError when it changes what other
        micro-batches have changed meanwhile."""
        held: list[tuple[_Found, Any]] = []
        for key, one in self._found.items():
            if key in self._left:
                continue
            own = one.now()
            if not _alike(own, one.value):
                one.put(_copy(one.value) if isinstance(one.value, Tensor) else plain(one.value))
                held.append((one, own))
        self._found.clear()
        try:
            yield
            for one, _ in held:
                if not _alike(one.now(), one.value):
                    raise SplitError(
                        f"the loss function changes '{one.name}' (of {type(one.holder).__name__}), which the model's "
                        "forward changes, too, and in a model that is cut other micro-batches have begun in between: "
                        "keep it elsewhere, or set pp=1 and segments=1, where nothing is cut"
                    )
        finally:
            for one, own in held:
                one.put(own)


class OwnBuffers:
    """Buffers that forwards write to, in a process where other micro-batches run between the forward and the backward
    of one: each has tensors of its own, which its graph keeps, so that backward finds what its forward found. Behind
    the forward the module has its own tensor again, with the new values.

    Of the user's modules: of what torch's own ones write, such as batch norms, no gradient depends. Who writes to a
    tensor that is a plain attribute is found out by autograd, unless it cannot notice (`unseen`, as in ChangedBuffers):
    then these are looked at, too.
    """

    def __init__(self, model: nn.Module, *, unseen: bool) -> None:
        self._always_compares = unseen
        self._modules = [
            module
            for module in model.modules()
            if (module._buffers or self._always_compares) and not type(module).__module__.startswith("torch.")
        ]
        self._written: set[tuple[int, StatePlace]] = set()
        """By which chunk."""
        self._compared: set[tuple[int, tuple[bool, ...]]] = set()

    @contextlib.contextmanager
    def around(self, chunk: int, afterwards: Afterwards | None = None) -> Iterator[None]:
        """Around the run of a chunk.

        What writes to `buffer.data` is not noticed: so values are compared, in the first run of each mode, and in all
        where code of the user's may do so.

        Args:
            afterwards: is told of buffers that it has changed; None: nobody asks.
        """
        if not self._modules or not (torch.is_grad_enabled() or afterwards is not None):
            yield
            return
        mode = (chunk, tuple(module.training for module in self._modules))
        compares = self._always_compares or mode not in self._compared
        self._compared.add(mode)
        copies: dict[int, Tensor] = {}
        others: list[tuple[StatePlace, Tensor, int]] = []
        held: list[tuple[StatePlace, Tensor, Tensor]] = []
        for place, tensor in list(self._tensors()):
            if tensor.requires_grad or not (compares or (chunk, place) in self._written):
                others.append((place, tensor, tensor._version))
                continue
            copied = copies.get(id(tensor))
            copied = copies[id(tensor)] = _copy(tensor) if copied is None else copied
            held.append((place, tensor, copied))
            self._holder(place)[place.name] = copied
        changed: list[StatePlace] = []
        try:
            yield
        finally:
            for place, tensor, copied in held:
                holder = self._holder(place)
                if holder.get(place.name, ABSENT) is not copied:
                    changed.append(place)
                    continue  # another tensor: nobody writes to this one again
                if (chunk, place) in self._written or copied._version or not _equal(copied, tensor):
                    self._written.add((chunk, place))
                    changed.append(place)
                    _write(tensor, copied)
                holder[place.name] = tensor
            for place, tensor, version in others:
                holder = self._holder(place)
                if holder.get(place.name) is not tensor:
                    changed.append(place)
                elif tensor._version != version:
                    self._written.add((chunk, place))
                    changed.append(place)
                    holder[place.name] = _copy(tensor)  # this micro-batch's graph has the other one
        for place in changed if afterwards is not None else ():
            now = self._holder(place).get(place.name)
            afterwards.note(self._modules[place.holder], place.name, now, is_buffer=place.is_buffer)  # type: ignore[union-attr]

    def _holder(self, place: StatePlace) -> dict[str, Any]:
        module = self._modules[place.holder]
        return module._buffers if place.is_buffer else vars(module)

    def _tensors(self) -> Iterator[tuple[StatePlace, Tensor]]:
        for number, module in enumerate(self._modules):
            holders = ((module._buffers, True), (vars(module), False))
            for holder, is_buffer in holders if self._always_compares else holders[:1]:
                for name, one in holder.items():
                    if isinstance(one, Tensor) and not (one.is_meta or one.is_inference()):
                        yield StatePlace(number, name, is_buffer), one


def _write(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)
        else:  # it got other memory
            buffer.data = _copy(value)


def _alike(one: Any, other: Any) -> bool:
    return same(one if isinstance(one, Tensor) else plain(one), other, _are_alike)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and _equal(one.detach(), other.detach())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or one.is_meta or one.equal(other)


class DrawnNumbers:
    """Of one micro-batch, for a process where code runs several times with it: the model's in front of its blocks for
    each chunk, and all of a chunk that recomputes. All runs see the same numbers.

    The first chunk that runs the micro-batch draws, in the order in which one process would; later ones draw the same
    again, and leave the generators as they were. torch's generators are seeded per micro-batch anyway.
    """

    def __init__(self) -> None:
        self._has_run = False
        self._before: LibraryState | None = None  # of the first run, if that drew anything
        self._before_chunk: dict[int, LibraryState] = {}  # likewise, of the first run of a chunk whose numbers are new

    @contextlib.contextmanager
    def once(self, chunk: int, *, again: bool = False) -> Iterator[None]:
        """Around the run of a chunk; `again`: it does what an earlier one did."""
        known = self._before or (self._before_chunk.get(chunk) if again else None)
        now = library_rng_state(whole=False) if known is not None or not again else None
        if known is not None:
            set_library_rng_state(known)
        try:
            yield
        finally:
            if known is not None and now is not None:
                set_library_rng_state(now)
            elif now is not None and not same_library_rng_state(now, library_rng_state(whole=False)):
                # Most loss functions draw nothing; then there is nothing to do for later chunks.
                self._before_chunk[chunk] = now
                if not self._has_run:
                    self._before = now
            self._has_run = True
