"""OverlapTrial: how TP.sync is hidden (tp_overlap), decided by the times of real steps."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fold3d.config import AUTO, TP_WAYS

logger = logging.getLogger(__name__)

STEPS_EACH = 3


class OverlapTrial:
    """Of one rank. All ranks of the job run the same steps, so they try and decide alike; every way gives the same
    numbers.

    With "auto" the first step, which compares results, is left out, then steps are run in every way in turns, three
    each; from then on as was fastest by the median of the slowest rank's times.
    """

    def __init__(self, asked: str, slowest: Callable[[Tensor], None], limit: float | None = None) -> None:
        """Args:
        asked: one of TP_WAYS, or "auto".
        slowest: gives every rank the elementwise maximum of everybody's tensor, in place; all ranks call.
        limit: seconds that the other way was predicted to take, where "sub" or "none" was chosen by that; if real steps
            take longer in the chosen way, the prediction was wrong, and all are tried.
        """
        self.way = TP_WAYS[0] if asked == AUTO else asked
        """Of the step under way."""
        self._decided = asked != AUTO
        self._limit = limit if self._decided else None
        self._slowest = slowest
        self._steps = 0
        self._seconds: dict[str, list[float]] = {way: [] for way in TP_WAYS}

    @property
    def in_halves(self) -> bool:
        """Whether micro-batches of the step under way run in halves."""
        return self.way == "sub"

    @property
    def fuses(self) -> bool:
        """Whether matrix products of the step under way communicate while they compute."""
        return self.way == "fused"

    @property
    def is_decided(self) -> bool:
        """Whether steps run in one way only from now on."""
        return self._decided

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forwards and backwards of one step; decides when there are times enough."""
        if self._decided and self._limit is None:
            yield
            return
        if not self._decided:
            self.way = TP_WAYS[self._steps % len(TP_WAYS)]
        start = time.perf_counter()
        yield
        if self._steps:  # the first one compares results
            self._seconds[self.way].append(time.perf_counter() - start)
        self._steps += 1
        if self._decided:
            self._doubt()
        elif min(map(len, self._seconds.values())) >= STEPS_EACH:
            self._decide()

    def _doubt(self) -> None:
        """Tries all ways where the predicted one turns out slower than the other one was predicted to be."""
        times = self._seconds[self.way]
        if len(times) < STEPS_EACH or self._limit is None:
            return
        found = torch.tensor([statistics.median(times)], dtype=torch.float64)
        self._slowest(found)
        if found.item() > self._limit:
            logger.info(
                "tp_overlap: steps take %.1f ms, longer than predicted for the other way (%.1f): all are tried",
                *(1e3 * found.item(), 1e3 * self._limit),
            )
            self._decided, self._seconds = False, {way: [] for way in TP_WAYS}
            # The first step may compare results, and is no measurement.
            self._steps = 0
        self._limit = None

    def _decide(self) -> None:
        mine = torch.tensor([statistics.median(times) for times in self._seconds.values()], dtype=torch.float64)
        self._slowest(mine)
        seconds = dict(zip(self._seconds, mine.tolist(), strict=True))
        self._decided, self.way = True, min(seconds, key=lambda way: seconds[way])
        logger.info(
            "tp_overlap: %s; a step's forwards and backwards take %s",
            self.way, ", ".join(f"{1e3 * each:.1f} ms with {way}" for way, each in seconds.items()),
        )  # fmt: skip
