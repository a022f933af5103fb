"""ChangedBuffers: buffers that a model's forward changes change once per micro-batch, however often its code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

Place = tuple[int, str]
"""Number of the module among those with buffers, and the buffer's name there."""
Before = dict[Place, Tensor]
"""Of one micro-batch: what the buffers held that its runs changed, before they did."""


class ChangedBuffers:
    """Those outside of the blocks, such as a running mean of the inputs, for a model whose code in front of the blocks
    runs for every chunk; and those of a chunk's blocks, such as a batch norm's, where its forward runs twice.

    The first run changes them. Each later one finds what that one found, in tensors of its own (so what autograd saves
    of them stays valid), and leaves no traces.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        inside = tuple(f"{block}." for block in blocks)
        named = [(name, module) for name, module in model.named_modules() if module._buffers]
        self._modules = [module for _, module in named]
        self._in_front = {number for number, (name, _) in enumerate(named) if not f"{name}.".startswith(inside)}
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
        fixed = {place: value for place, value in before.items() if place[0] in self._in_front and not in_front}
        watched = [
            (place, buffer) for place, buffer in self._all() if (in_front if place[0] in self._in_front else recomputes)
        ]
        # Kernels of batch norms change their statistics without saying so: values are compared, but only once,
        # because that waits for a GPU.
        mode = (chunk, recomputes, tuple(module.training for module in self._modules))
        compares = mode not in self._compared
        self._compared.add(mode)
        then = [
            (place, buffer, _version(buffer), _copy(buffer) if compares or place in self._changing else buffer)
            for place, buffer in watched
        ]
        try:
            with self._holding(fixed):
                yield
        finally:
            for place, old, version, value in then:
                replaced = self._modules[place[0]]._buffers.get(place[1]) is not old
                written = version != _version(old) or not _equal(value, old)
                if replaced or written:
                    self._changing.add(place)
                    if value is not old or not written:
                        before.setdefault(place, value)

    @contextlib.contextmanager
    def again(self, before: Before) -> Iterator[None]:
        """Around a run of a chunk that does what its first one with the micro-batch did."""
        with self._holding(before):
            yield

    @contextlib.contextmanager
    def _holding(self, values: Mapping[Place, Tensor]) -> Iterator[None]:
        """Has the modules hold copies of `values` for a while, a buffer of several modules the same copy."""
        copies: dict[int, Tensor] = {}
        held: list[tuple[nn.Module, str, Tensor | None]] = []
        for (number, name), value in values.items():
            buffers = self._modules[number]._buffers
            own = buffers.get(name)
            held.append((self._modules[number], name, own))
            buffers[name] = copies.setdefault(id(value if own is None else own), _copy(value))
        try:
            yield
        finally:
            for module, name, own in held:
                module._buffers[name] = own

    def _all(self) -> list[tuple[Place, Tensor]]:
        return [
            ((number, name), buffer)
            for number, module in enumerate(self._modules)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or one.is_meta or one.equal(other)


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
