"""DrawnNumbers: Python's and numpy's random numbers that a loss function draws for a micro-batch are drawn once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fold3d.device import LibraryState, library_rng_state, same_library_rng_state, set_library_rng_state


class DrawnNumbers:
    """Of one micro-batch, for a process with several chunks: the loss function runs for each, and all see the same.

    The first chunk that runs the micro-batch draws, in the order in which one process would; later ones draw the same
    again, and leave the generators as they were. torch's generators are seeded per micro-batch anyway.
    """

    def __init__(self) -> None:
        self._has_run = False
        self._before: LibraryState | None = None  # of the first run, if that drew anything

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Around the run of a chunk."""
        if not self._has_run:
            before = library_rng_state()
            try:
                yield
            finally:
                self._has_run = True
                # Most loss functions draw nothing; then there is nothing to do for later chunks.
                self._before = None if same_library_rng_state(before, library_rng_state()) else before
            return
        if self._before is None:
            yield
            return
        now = library_rng_state()
        set_library_rng_state(self._before)
        try:
            yield
        finally:
            set_library_rng_state(now)
