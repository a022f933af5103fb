"""Fixtures of the whole suite: rank pools, seeds, and the markers' rules."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the ranks of a test share few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the suite is fetched
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("FOLD3D_CACHE", "off")  # commands run, and leave nothing behind

import random
from collections.abc import Iterator

import hypothesis
import pytest

from tests.helpers import call, cuda, gate
from tests.helpers.ranks import RankPool

cuda.hide()

hypothesis.settings.register_profile("fold3d", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fold3d")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four worker processes, started on first use."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def new_workers_after_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules of failed jobs end their workers: gloo's threads may spin on connections that broke off."""
    if not _fails_jobs(request.module.__name__):
        yield
        return
    pool: RankPool = request.getfixturevalue("ranks")
    yield
    pool.close()


LONGEST = ("test_quality", "test_examples")


def _place(item: pytest.Item) -> int:
    module = item.module.__name__ if isinstance(item, pytest.Function) else ""
    return -1 if module.endswith(LONGEST) else int(_fails_jobs(module))


def _fails_jobs(module: str) -> bool:
    return ".test_failure" in module


@pytest.fixture(scope="session")
def ranks8() -> Iterator[RankPool]:
    """Eight worker processes, for the handful of tests that need more than four."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def cuda_ranks() -> Iterator[RankPool]:
    """Two worker processes that see CUDA devices, for `cuda` tests."""
    pool = RankPool(2, cuda=True)
    yield pool
    pool.close()


_FEW = 20


@pytest.fixture(autouse=True)
def _imports_are_not_searched() -> None:
    call.freeze_imports(_FEW)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Same random numbers for every test, whatever ran before; the default dtype is put back."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that start processes as `dist`, and as `full` what `make test` leaves out (`tests.helpers.gate`).

    Modules of failed jobs, which end their workers, come last: the others share theirs. mypy and the demo come first:
    each takes a minute or more, which is no matter while there is work for the others.
    """
    items.sort(key=_place)
    for item in items:
        if {"ranks", "ranks8", "cuda_ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.dist)
    gate.mark(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips `cuda` tests where there are fewer devices than they need.

    With FOLD3D_REQUIRE_CUDA=1 (a machine that should have a GPU) none at all is a failure, not a skip.
    """
    marker = item.get_closest_marker("cuda")
    if marker is None:
        return
    if not cuda.device_count() and os.environ.get("FOLD3D_REQUIRE_CUDA") == "1":
        pytest.fail("FOLD3D_REQUIRE_CUDA=1, but torch finds no CUDA device", pytrace=False)
    cuda.skip_unless_served((*marker.args, 1)[0])
