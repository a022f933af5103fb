"""DrawnNumbers: Python's and numpy's random numbers that are drawn for a micro-batch are drawn once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fold3d.device import LibraryState, library_rng_state, same_library_rng_state, set_library_rng_state


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
        now = library_rng_state() if known is not None or not again else None
        if known is not None:
            set_library_rng_state(known)
        try:
            yield
        finally:
            if known is not None and now is not None:
                set_library_rng_state(now)
            elif now is not None and not same_library_rng_state(now, library_rng_state()):
                # Most loss functions draw nothing; then there is nothing to do for later chunks.
                self._before_chunk[chunk] = now
                if not self._has_run:
                    self._before = now
            self._has_run = True
