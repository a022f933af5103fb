"""The device of this process and its random numbers.

An accelerator is any device of torch that is not the CPU: it works by itself, in the order of streams, and torch has a
library for its memory (NCCL for CUDA). Nothing in fold3d asks for a kind of it by name where this module can say.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

LibraryState = tuple[Any, Any]
"""Of Python's generator, and of numpy's."""

_ALONE = ("mps",)
"""Types of accelerators whose memory no backend of torch.distributed takes."""


def default_device() -> torch.device:
    """Returns this process's of the host's accelerators, as launchers number processes; the CPU where ranks could not
    exchange what lies on one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type in _ALONE:
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def is_accelerator(device: torch.device) -> bool:
    """Returns whether `device` works by itself while the host goes on."""
    return device.type not in ("cpu", "meta")


def make_current(device: torch.device) -> torch.device:
    """Makes an accelerator this thread's current one, and gives it its index, by which other threads find it."""
    if not is_accelerator(device):
        return device
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return torch.device(device.type, torch.accelerator.current_device_index())


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was told; at once for the CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def total_memory(device: torch.device) -> int | None:
    """Returns the bytes of an accelerator's memory; None for the CPU, and where torch does not know."""
    if not is_accelerator(device):
        return None
    if device.type == "cuda":  # without asking the driver
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except RuntimeError:  # its allocator does not say
        return None


def pci_address(device: torch.device) -> str | None:
    """Returns an accelerator's address on PCIe, as the system writes it; None where torch does not know."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


@contextlib.contextmanager
def rng_untouched(device: torch.device) -> Iterator[None]:
    """Seeding dropout inside must not change what data loaders and the user draw outside."""
    if is_accelerator(device):
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield
    else:
        with torch.random.fork_rng(devices=[]):
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


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns where those parameters of the model lie that have storage; the CPU where there are none."""
    return next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))


def library_rng_state(*, whole: bool = True) -> LibraryState:
    """Returns the states of Python's and numpy's generators.

    Args:
        whole: False: nobody has set numpy's state since it was read whole, but to one that he draws from. Then its
            bytes in memory tell whether anybody has drawn; to read it through numpy takes 30 us, as long as several
            operators of torch.
    """
    return _python_rng.state(), _numpy_rng.state(whole=whole)


def set_library_rng_state(state: LibraryState) -> None:
    """Puts them back."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    _numpy_rng.forget()


def seed_libraries(seed: int) -> None:
    """Seeds Python's and numpy's generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    _numpy_rng.forget()


def same_library_rng_state(one: LibraryState, other: LibraryState) -> bool:
    """Returns whether nobody drew from Python's and numpy's generators between the two."""
    of_one, of_other = one[1], other[1]
    if of_one is not of_other and not (of_one[2:] == of_other[2:] and np.array_equal(of_one[1], of_other[1])):
        return False
    return bool(one[0] is other[0] or one[0] == other[0])


class _NumpyRng:
    """numpy's generator, read through numpy only where it is another than before."""

    _BYTES = 625 * 4  # of a Mersenne Twister: 624 words and the place among them

    def __init__(self) -> None:
        self._known: tuple[bytes, Any] | None = None

    def state(self, *, whole: bool) -> Any:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state()
        now = ctypes.string_at(generator.ctypes.state_address, self._BYTES)
        if whole or self._known is None or self._known[0] != now:
            state: Any = np.random.get_state()
            # Where the second of two normal numbers is waiting, to draw it changes none of these bytes.
            self._known = None if state[3] else (now, state)
            return state
        return self._known[1]

    def forget(self) -> None:
        self._known = None


class _PythonRng:
    """Python's generator likewise: to make a tuple of its 625 numbers takes 20 us."""

    def __init__(self) -> None:
        self._generator: Any = random._inst
        self._known: tuple[bytes, Any, Any] = b"", None, None
        one = random.Random(0)
        before = self._bytes_of(one)
        one.random()
        self._shows = before != self._bytes_of(one)  # as CPython's objects do

    def state(self) -> Any:
        now, waiting = self._bytes_of(self._generator), self._generator.gauss_next
        if not self._shows or self._known[:2] != (now, waiting):
            self._known = now, waiting, random.getstate()
        return self._known[2]

    @staticmethod
    def _bytes_of(generator: random.Random) -> bytes:
        head = object.__basicsize__
        return ctypes.string_at(id(generator) + head, _random.Random.__basicsize__ - head)


_numpy_rng, _python_rng = _NumpyRng(), _PythonRng()


def processes_of_host() -> int:
    """Returns how many processes of the job run on this host, as launchers such as torchrun say it; else 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
