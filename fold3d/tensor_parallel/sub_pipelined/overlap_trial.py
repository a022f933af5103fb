"""OverlapTrial: whether halves of a micro-batch take turns (tp_overlap), decided by the times of real steps."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

STEPS_EACH = 3


class OverlapTrial:
    """Of one rank. All ranks of the job run the same steps, so they try and decide alike; every way gives the same
    numbers.

    With "auto" the first step, which compares results, is left out, then steps are run in halves and whole in turns,
    three of each; from then on as was faster by the median of the slowest rank's times.
    """

    def __init__(self, asked: str, slowest: Callable[[Tensor], None]) -> None:
        """Args:
        asked: "auto", "sub" or "none".
        slowest: gives every rank the elementwise maximum of everybody's tensor, in place; all ranks call.
        """
        self.in_halves = asked != "none"
        """Whether micro-batches of the step under way run in halves."""
        self._decided = asked != "auto"
        self._slowest = slowest
        self._steps = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def is_decided(self) -> bool:
        """Whether steps run in one way only from now on."""
        return self._decided

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forwards and backwards of one step; decides when there are times enough."""
        if self._decided:
            yield
            return
        self.in_halves = self._steps % 2 == 0
        start = time.perf_counter()
        yield
        if self._steps:  # the first one compares results
            self._seconds[self.in_halves].append(time.perf_counter() - start)
        self._steps += 1
        if min(map(len, self._seconds.values())) >= STEPS_EACH:
            self._decide()

    def _decide(self) -> None:
        mine = torch.tensor([statistics.median(self._seconds[way]) for way in (True, False)], dtype=torch.float64)
        self._slowest(mine)
        halves, whole = mine.tolist()
        self._decided, self.in_halves = True, halves <= whole
        logger.info(
            "tp_overlap: %s, a step's forwards and backwards take %.1f ms in halves and %.1f ms whole",
            "sub" if self.in_halves else "none", 1e3 * halves, 1e3 * whole,
        )  # fmt: skip
