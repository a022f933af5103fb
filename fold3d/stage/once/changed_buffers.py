"""ChangedBuffers: buffers and plain attributes that a model's forward changes change once per micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fold3d.stage.once.module_values import ABSENT, PlainAttributes, plain, put, same


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
        attributes = PlainAttributes(self._model, {number: self._modules[number] for number in watched})
        then = [
            (place, tensor, _version(tensor), _copy(tensor) if compares or place in self._changing else tensor)
            for number, known in attributes.values.items()
            for place, tensor in self._tensors(number, known)
        ]
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
            for number, name, value, now in attributes.changed():
                before.setdefault(Place(number, name, False), _Change(value, now))

    @contextlib.contextmanager
    def again(self, before: Before) -> Iterator[None]:
        """Around a run of a chunk that does what its first one with the micro-batch did."""
        with self._holding(before):
            yield

    @contextlib.contextmanager
    def _holding(self, values: Mapping[Place, Any]) -> Iterator[None]:
        """Has the modules hold copies of `values` for a while, a buffer of several modules the same copy."""
        copies: dict[int, Tensor] = {}
        held: list[tuple[Place, Any]] = []
        for place, kept in values.items():
            value = kept.before if isinstance(kept, _Change) else kept
            holder = self._holder(place)
            own = holder.get(place.name, ABSENT)
            held.append((place, own))
            if isinstance(value, Tensor):
                value = copies.setdefault(id(own if isinstance(own, Tensor) else value), _copy(value))
            put(holder, place.name, plain(value))
        try:
            yield
        finally:
            for place, own in held:
                kept, now = values[place], self._holder(place).get(place.name, ABSENT)
                if isinstance(kept, _Change) and not (_alike(now, kept.before) or _alike(now, kept.after)):
                    continue  # what lies behind the first run's chunk has changed it, too
                put(self._holder(place), place.name, own)

    def _holder(self, place: Place) -> dict[str, Any]:
        module = self._modules[place.module]
        held: dict[str, Any] = module._buffers if place.is_buffer else vars(module)
        return held

    def _tensors(self, number: int, attributes: Mapping[str, Any]) -> Iterator[tuple[Place, Tensor]]:
        for names, is_buffer in ((self._modules[number]._buffers, True), (attributes, False)):
            for name, value in names.items():
                if isinstance(value, Tensor):
                    yield Place(number, name, is_buffer), value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _equal(one.detach(), other.detach())
    return same(plain(one), other)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or one.is_meta or one.equal(other)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
