"""FrontBuffers: buffers that a model's forward changes before its blocks change once per micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class FrontBuffers:
    """The buffers outside of the blocks, for a model whose code in front of the blocks runs for every chunk.

    The first of a process's chunks to run may change them, as a running mean of the inputs does; after later ones they
    are again what they were.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        inside = tuple(f"{block}." for block in blocks)
        self._model = model
        self._modules = [
            module for name, module in model.named_modules() if not f"{name}.".startswith(inside) and module._buffers
        ]
        self._first: int | None = None
        self._changing: set[tuple[int, str]] = set()
        self._compared: set[bool] = set()  # in which modes values have been compared

    @contextlib.contextmanager
    def of_chunk(self, chunk: int) -> Iterator[None]:
        """Around the run of a chunk."""
        self._first = chunk if self._first is None else min(self._first, chunk)
        if chunk == self._first:
            # Kernels of batch norms change their statistics without saying so: values are compared, but only once,
            # because that waits for a GPU.
            compares = self._model.training not in self._compared
            self._compared.add(self._model.training)
            before = {
                place: (buffer, _version(buffer), buffer.detach().clone() if compares else buffer)
                for place, buffer in self._all()
            }
            try:
                yield
            finally:
                for place, buffer in self._all():
                    old, version, value = before.get(place, (None, 0, buffer))
                    if old is not buffer or version != _version(buffer) or not _equal(value, buffer):
                        self._changing.add(place)
            return
        kept = [(place, buffer, buffer.detach().clone()) for place, buffer in self._all() if place in self._changing]
        try:
            yield
        finally:
            for (number, name), buffer, value in kept:
                buffer.data.copy_(value)  # .data: what autograd saved of it stays valid
                self._modules[number]._buffers[name] = buffer

    def _all(self) -> list[tuple[tuple[int, str], Tensor]]:
        return [
            ((number, name), buffer)
            for number, module in enumerate(self._modules)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or one.is_meta or torch.equal(one, other)


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
