"""FailureBoard, where no other rank is needed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from fold3d.faults import failure
from fold3d.faults.failure import FailureBoard, is_communication_error
from fold3d.faults.progress import Progress
from fold3d.topology import Topology


class SlowStore(dist.Store):
    """A store that takes its time to answer, as one in a file or far away does."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        time.sleep(0.05)
        return bool(self._store.check(list(keys)))


def test_closing_ends_the_threads() -> None:
    """The store's thread, which is to be woken up, may be at its look and end by itself."""
    board = FailureBoard(SlowStore(), "job", Topology(dp=2, pp=1, rank=0), 30.0, Progress())
    board.close()
    for thread in (board._talker, board._watcher):
        thread.join(timeout=30.0)
        assert not thread.is_alive()


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


@pytest.mark.parametrize(
    "error, is_one",
    [
        (RuntimeError("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("Gloo connectFullMesh failed with timeout"), True),
        (FileNotFoundError(2, "No such file or directory", "/home/pgloor/gloo/part-1.bin"), False),
        (RuntimeError("the gloomy sample has no label"), False),
    ],
    ids=str,
)
def test_who_is_blamed(error: Exception, is_one: bool) -> None:
    """A user's error with these letters in it was taken for a lost connection."""
    assert is_communication_error(error) is is_one
