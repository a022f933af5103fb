"""ChangedBuffers: buffers and plain attributes that a model's forward changes change once per micro-batch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Place(NamedTuple):
    """Where a value is kept."""

    module: int
    """Number among those that are looked at."""
    name: str
    is_buffer: bool
    """Whether it is a buffer there, or an attribute."""


class _Change(NamedTuple):
    """Of an attribute: what it was before the first run, and behind it."""

    before: Any
    after: Any


Before = dict[Place, Any]
"""Of one micro-batch: what its runs changed, as it was before they did."""

_ABSENT = object()
"""In the place of an attribute that the forward makes."""
_OTHER = object()
"""In the place of a value that is not looked at."""
_SIMPLE = frozenset((bool, int, float, complex, str, bytes, type(None)))
_COLLECTIONS = frozenset((list, tuple, set, frozenset, deque))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ChangedBuffers:
    """Those outside of the blocks, such as a running mean of the inputs, for a model whose code in front of the blocks
    runs for every chunk; and those of a chunk's blocks, such as a batch norm's, where its forward runs twice.

    The first run changes them. Each later one finds what that one found, in tensors and containers of its own (so what
    autograd saves of them stays valid), and leaves no traces.

    Of attributes numbers, text, None, tensors without a gradient, and lists, dictionaries, sets and tuples of them: a
    counter, a cache, a flag. Others stay as the last run left them, such as a loss that a layer keeps for later. So do
    hooks that a forward registers, and the flag that says so, if it was absent, False or None before: transformers'
    models do that when hidden states are first asked for, and would register them again.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model = model
        inside = tuple(f"{block}." for block in blocks)
        # The forwards of torch's own modules change nothing but buffers.
        named = [(n, m) for n, m in model.named_modules() if m._buffers or not type(m).__module__.startswith("torch.")]
        self._modules = [module for _, module in named]
        self._in_front = [not f"{name}.".startswith(inside) for name, _ in named]
        self._first: int | None = None
        self._changing: set[Place] = set()
        self._compared: set[tuple[int, bool, tuple[bool, ...]]] = set()  # in which modes values have been compared

    @contextlib.contextmanager
    def of_chunk(self, chunk: int, before: Before, *, recomputes: bool = False) -> Iterator[None]:
        """Around the run of a chunk.

        Args:
            before: of the micro-batch; what this run changes is put in.
            recomputes: the chunk will run again with this micro-batch, see `again`.
        """
        self._first = chunk if self._first is None else min(self._first, chunk)
        in_front = chunk == self._first
        fixed = {place: value for place, value in before.items() if self._in_front[place.module] and not in_front}
        watched = [n for n, is_outside in enumerate(self._in_front) if (in_front if is_outside else recomputes)]
        # Kernels of batch norms change their statistics without saying so: values are compared, but only once,
        # because that waits for a GPU.
        mode = (chunk, recomputes, tuple(module.training for module in self._modules))
        compares = mode not in self._compared
        self._compared.add(mode)
        attributes = {number: _attributes(self._modules[number]) for number in watched}
        then = [
            (place, tensor, _version(tensor), _copy(tensor) if compares or place in self._changing else tensor)
            for number, known in attributes.items()
            for place, tensor in self._tensors(number, known)
        ]
        first_hook = RemovableHandle.next_id
        try:
            with self._holding(fixed):
                yield
        finally:
            for place, old, version, value in then:
                replaced = place.is_buffer and self._holder(place).get(place.name) is not old
                written = version != _version(old) or not _equal(value, old)
                if replaced or written:
                    self._changing.add(place)
                    if value is not old or not written:
                        before.setdefault(place, value)
            registers = self._has_hook_since(first_hook)
            for number, known in attributes.items():
                now = vars(self._modules[number])
                for name in known.keys() | (now.keys() - _OF_EVERY_MODULE):
                    one, other = known.get(name, _ABSENT), now.get(name, _ABSENT)
                    if registers and (one is _ABSENT or one is None or one is False):
                        continue
                    if one is not other and one is not _OTHER and not _same(one, other) and _is_plain(other):
                        before.setdefault(Place(number, name, False), _Change(one, _plain(other)))

    @contextlib.contextmanager
    def again(self, before: Before) -> Iterator[None]:
        """Around a run of a chunk that does what its first one with the micro-batch did."""
        with self._holding(before):
            yield

    def restore_attributes(self, before: Before) -> bool:
        """Makes attributes what they were before the runs that filled `before`; returns whether any was changed."""
        changed = [(place, value) for place, value in before.items() if not place.is_buffer]
        for place, kept in changed:
            value = kept.before if isinstance(kept, _Change) else kept
            if value is _ABSENT:
                self._holder(place).pop(place.name, None)
            else:
                self._holder(place)[place.name] = value
        return bool(changed)

    @contextlib.contextmanager
    def _holding(self, values: Mapping[Place, Any]) -> Iterator[None]:
        """Has the modules hold copies of `values` for a while, a buffer of several modules the same copy."""
        copies: dict[int, Tensor] = {}
        held: list[tuple[Place, Any]] = []
        for place, kept in values.items():
            value = kept.before if isinstance(kept, _Change) else kept
            holder = self._holder(place)
            own = holder.get(place.name, _ABSENT)
            held.append((place, own))
            if value is _ABSENT:
                holder.pop(place.name, None)
            elif isinstance(value, Tensor):
                holder[place.name] = copies.setdefault(id(own if isinstance(own, Tensor) else value), _copy(value))
            else:
                holder[place.name] = _plain(value)
        try:
            yield
        finally:
            for place, own in held:
                kept, now = values[place], self._holder(place).get(place.name, _ABSENT)
                if isinstance(kept, _Change) and not (_alike(now, kept.before) or _alike(now, kept.after)):
                    continue  # what lies behind the first run's chunk has changed it, too
                if own is _ABSENT:
                    self._holder(place).pop(place.name, None)
                else:
                    self._holder(place)[place.name] = own

    def _has_hook_since(self, number: int) -> bool:
        """Whether a module has a hook that was registered since torch's number of the next one was `number`."""
        return RemovableHandle.next_id > number and any(
            key >= number
            for module in self._model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            for key in hooks
        )

    def _holder(self, place: Place) -> dict[str, Any]:
        module = self._modules[place.module]
        held: dict[str, Any] = module._buffers if place.is_buffer else vars(module)
        return held

    def _tensors(self, number: int, attributes: Mapping[str, Any]) -> Iterator[tuple[Place, Tensor]]:
        for names, is_buffer in ((self._modules[number]._buffers, True), (attributes, False)):
            for name, value in names.items():
                if isinstance(value, Tensor):
                    yield Place(number, name, is_buffer), value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value if type(value) in _SIMPLE else _plain(value)  # written out: there are many of them
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def _is_plain(value: Any) -> bool:
    return value is _ABSENT or _plain(value) is not _OTHER


def _plain(value: Any) -> Any:
    """Returns `value`, in containers of its own; _OTHER for what is not looked at."""
    kind = type(value)
    if kind in _SIMPLE or (isinstance(value, Tensor) and not value.requires_grad):
        return value
    if kind is dict or kind in _COLLECTIONS:
        values = [_plain(one) for one in (value.values() if kind is dict else value)]
        if not any(one is _OTHER for one in values):
            return dict(zip(value, values, strict=True)) if kind is dict else kind(values)
    return _OTHER


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same; a tensor is only itself."""
    kind = type(one)
    if one is other or kind is not type(other) or isinstance(one, Tensor):
        return one is other
    if kind is dict:
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    if kind in (list, tuple, deque):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _equal(one.detach(), other.detach())
    return _same(_plain(one), other)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or one.is_meta or one.equal(other)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
