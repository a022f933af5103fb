"""Kernels declare what they read and write: the simulated device's race detector needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import RankPool


@pytest.fixture(scope="module")
def sim() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


def test_they_run_in_the_order_of_streams(sim: RankPool) -> None:
    sim.run("simdevice.tests.kernels:ordered", 1)


def test_the_detector_sees_what_they_touch(sim: RankPool) -> None:
    (found,) = sim.run("simdevice.tests.kernels:races", 1)
    for text, kernel, access in zip(
        found, ("squares", "pack", "unpack", "adamw_"), ("reads", "reads", "writes", "writes"), strict=True
    ):
        assert "data race" in text and f"fold3d::{kernel}" in text and access in text
