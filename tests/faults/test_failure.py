"""FailureBoard, where no other rank is needed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from fold3d.faults import failure
from fold3d.faults.failure import FailureBoard
from fold3d.faults.progress import Progress
from fold3d.topology import Topology


class SlowStore:
    """A store that takes its time to answer, as one in a file or far away does."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        time.sleep(0.05)
        return bool(self._store.check(list(keys)))


def test_closing_does_not_wait_for_a_thread_that_has_ended() -> None:
    """The store's thread, which is to be woken up, may be at its look and end by itself; that cost a second."""
    board = FailureBoard(SlowStore(), "job", Topology(dp=2, pp=1, rank=0), 30.0, Progress())
    start = time.monotonic()
    board.close()
    assert time.monotonic() - start < 0.9


class Batch:
    """Stands for the tensors that a step's frames hold."""


def test_a_failed_step_is_let_go() -> None:
    """While a rank looks for the cause of a failure, its frames are watched; they held the step's batches for ever."""
    board = FailureBoard(dist.HashStore(), "job", Topology(dp=2, pp=1, rank=1), 30.0, Progress())
    board.publish("the job failed")

    def step() -> weakref.ref[Batch]:
        batch = Batch()
        time.sleep(4 * failure._LOOK_SECONDS)  # in sight of several looks
        return weakref.ref(batch)

    batch = step()
    board.raised()
    until = time.monotonic() + 5.0
    while batch() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    kept = batch() is not None
    board.close()
    assert not kept
