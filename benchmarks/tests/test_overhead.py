"""What benchmarks/overhead.py and benchmarks/gradient_counting.py measure runs."""

from __future__ import annotations

import torch

from benchmarks import gradient_counting
from benchmarks.overhead import MICRO_BATCHES, WIDTH, EmptyChunk, Scale
from fold3d import _C
from fold3d import schedule as schedules


def test_the_executor_takes_the_empty_chunk() -> None:
    chunk = EmptyChunk(Scale(), torch.ones(1, WIDTH), is_last=True)
    executor = _C.Executor([chunk], 0, 1, {}, torch.device("cpu"), 10.0, "rank 0")
    compute = schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES)
    losses = executor.run(schedules.lower(compute, reduce=False), 0, True, range(MICRO_BATCHES))
    executor.close()
    assert [loss.item() for loss in losses] == [WIDTH] * MICRO_BATCHES
    assert torch.equal(chunk.module.weight.grad, torch.tensor([float(WIDTH * MICRO_BATCHES)]))


def test_every_gradient_is_counted() -> None:
    found = gradient_counting.counting(torch.float32, rounds=1)
    assert found["plain"] > 0 and found["counted"] > 0
