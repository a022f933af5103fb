"""Parts: tensors that have been returned on this rank, of which it has a part, and how the whole is put together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch import Tensor

PutTogether = Callable[[Tensor], Tensor]
"""Returns the whole, the same on each rank; all ranks of the group call it."""


class Parts:
    """Those that are still alive. What backward computes again is none: nobody returns it from the model."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[Tensor], PutTogether]] = []

    def note(self, part: Tensor, whole: PutTogether) -> None:
        """`part` has been returned."""
        self._noted = [(ref, how) for ref, how in self._noted if ref() is not None]
        self._noted.append((weakref.ref(part), whole))

    def __iter__(self) -> Iterator[tuple[Tensor, PutTogether]]:
        for ref, whole in self._noted:
            part = ref()
            if part is not None:
                yield part, whole
