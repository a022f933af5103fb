"""Processes that have the simulated device, apart from those of other tests, whose accelerator it must not become."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.helpers.ranks import RankPool


@pytest.fixture(scope="session")
def sim_ranks() -> Iterator[RankPool]:
    """Two worker processes; what they run imports simdevice.sim."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sim_ranks4() -> Iterator[RankPool]:
    """Four of them, for the tests that take turns."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _device_stays_away() -> Iterator[None]:
    """Fails a test that brings the device into pytest's own process, as by reading a result whose class imports it."""
    yield
    assert "simdevice.sim" not in sys.modules, "the simulated device is the accelerator of all later tests now"
