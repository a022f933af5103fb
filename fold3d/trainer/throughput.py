"""Throughput: tokens per second of training, evaluation and saving not counted."""

from __future__ import annotations

import time


class Throughput:
    """Counts one replica's tokens and the seconds of its optimizer steps between two readings."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """A step begins: its batches are about to be loaded."""
        self._started = time.perf_counter()

    def count(self, tokens: int) -> None:
        """The step's batches hold `tokens` input tokens."""
        self._tokens += tokens

    def stop(self) -> None:
        """The step has ended."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def read(self) -> tuple[int, float]:
        """Returns tokens and seconds since the last reading."""
        reading = (self._tokens, self._seconds)
        self._tokens, self._seconds = 0, 0.0
        return reading
