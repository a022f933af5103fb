"""Throughput: tokens and seconds of training steps, evaluation and saving not counted."""

from __future__ import annotations

import time


class Throughput:
    """Counts one replica's tokens and the seconds of its optimizer steps between two readings."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._started: float | None = None
        self.step_ms = 0.0
        """Milliseconds of the last step, from loading its batches to its end."""

    def start(self) -> None:
        """A step begins: its batches are about to be loaded."""
        self._started = time.perf_counter()

    def count(self, tokens: int) -> None:
        """The step's batches hold `tokens` input tokens."""
        self._tokens += tokens

    def stop(self) -> None:
        """The step has ended."""
        if self._started is not None:
            seconds = time.perf_counter() - self._started
            self._seconds += seconds
            self._started, self.step_ms = None, 1e3 * seconds

    def read(self) -> tuple[int, float]:
        """Returns tokens and seconds since the last reading."""
        reading = (self._tokens, self._seconds)
        self._tokens, self._seconds = 0, 0.0
        return reading
