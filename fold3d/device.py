"""The device of this process and its random numbers."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

LibraryState = tuple[Any, Any]
"""Of Python's generator, and of numpy's."""


def default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def make_current(device: torch.device) -> torch.device:
    """Makes a CUDA device this thread's current one, and gives it its index, by which other threads find it."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def rng_untouched(device: torch.device) -> Iterator[None]:
    """Seeding dropout inside must not change what data loaders and the user draw outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def all_rng_untouched(device: torch.device) -> Iterator[None]:
    """The same for Python's and numpy's generators, too: samples and losses may draw from any that are seeded."""
    state = library_rng_state()
    try:
        with rng_untouched(device):
            yield
    finally:
        set_library_rng_state(state)


def library_rng_state() -> LibraryState:
    """Returns the states of Python's and numpy's generators."""
    return random.getstate(), np.random.get_state()


def set_library_rng_state(state: LibraryState) -> None:
    """Puts them back."""
    random.setstate(state[0])
    np.random.set_state(state[1])


def same_library_rng_state(one: LibraryState, other: LibraryState) -> bool:
    """Returns whether nobody drew from Python's and numpy's generators between the two."""
    of_one, of_other = one[1], other[1]
    return bool(one[0] == other[0] and of_one[2:] == of_other[2:] and np.array_equal(of_one[1], of_other[1]))


def processes_of_host() -> int:
    """Returns how many processes of the job run on this host, as launchers such as torchrun say it; else 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
