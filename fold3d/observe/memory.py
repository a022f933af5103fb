"""MemoryWatch: the most memory that a rank has needed, beside what was planned; and what to say when it runs out."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fold3d import _C
from fold3d.config import text_of_bytes
from fold3d.device import is_accelerator, total_memory

NEARLY_ALL = 0.9
"""Share of the limit from which on a rank says what to change."""
_STATUS = Path("/proc/self/status")
_FULL = ("can't allocate memory", "not enough memory")
"""In the messages of torch's CPU allocator."""


class MemoryWatch:
    """Of one rank. On a GPU torch's allocator is asked; on the CPU the process's resident memory, or, where the user
    limits memory, what tensors hold (csrc/runtime/memory)."""

    def __init__(
        self,
        device: torch.device,
        limit: int | None,
        expected: int | None,
        curves: Callable[[], Sequence[_C.StageMemory]] = tuple,
        changes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Args:
        limit: bytes that a rank may use; None: on a GPU all of its memory.
        expected: bytes that the plan says of this rank; None: nothing was planned.
        curves: makes the bytes that every stage should have over a step; none where nothing was planned.
        changes: makes the settings with which less memory is needed, the cheapest first; asked when little is left.
        """
        self._device = device
        self.expected, self.curves, self._changes = expected, curves, changes
        self._counts = device.type == "cpu" and limit is not None and _C.count_cpu_bytes(True)
        if self._counts:
            _C.reset_peak_cpu_bytes()  # another engine's
        if limit is None:
            limit = total_memory(device)
        self._limit = limit
        self._before = 0
        self._warned = limit is None or (device.type == "cpu" and not self._counts)

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Training begins: what making the model and measuring it has needed does not count.

        Args:
            tensors: parameters and buffers of this rank; some are older than the count.
        """
        if is_accelerator(self._device):
            torch.accelerator.reset_peak_memory_stats(self._device)
        if not self._counts:
            return
        older = {id(t.untyped_storage()): t for t in tensors if not t.is_meta and not _C.is_counted(t)}
        self._before = sum(tensor.untyped_storage().nbytes() for tensor in older.values())
        _C.reset_peak_cpu_bytes()

    @property
    def peak(self) -> int:
        """The most bytes so far: of tensors, or of the process where nobody counts those."""
        return self._before + _C.peak_cpu_bytes() if self._counts else peak_bytes(self._device)

    @property
    def _planned(self) -> str:
        return "nothing was planned" if self.expected is None else f"planned were {text_of_bytes(self.expected)}"

    def warning(self) -> str | None:
        """Returns what to say, once, when little is left of the limit."""
        if self._warned or self._limit is None or self.peak < NEARLY_ALL * self._limit:
            return None
        self._warned = True
        share = f"{100 * self.peak / self._limit:.0f} % of {text_of_bytes(self._limit)}"
        return (
            f"this rank has used {text_of_bytes(self.peak)} of memory, {share}; {self._planned}{_told(self._changes())}"
        )

    @contextlib.contextmanager
    def explains(self, instead: Sequence[str] = ()) -> Iterator[None]:
        """In its body running out of memory is told with what was planned, what was measured and what would help.

        Args:
            instead: what would help, where settings of the training would not.
        Raises: torch.OutOfMemoryError on a GPU, MemoryError on the CPU.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            first = (str(error).splitlines() or [type(error).__name__])[0]
            told = _told(instead or self._changes())
            text = f"{first}; this rank had used {text_of_bytes(self.peak)} at most, {self._planned}{told}"
            kind = MemoryError if self._device.type == "cpu" else torch.OutOfMemoryError
            raise kind(text) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` says that there is no memory left, on a GPU or the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL)


def _told(changes: Sequence[str]) -> str:
    return "; the cheapest ways to need less:" + "".join(f"\n  {change}" for change in changes) if changes else ""


def peak_bytes(device: torch.device) -> int:
    """Returns the most bytes that torch's allocator had given out on a GPU; for the CPU the process's peak resident
    memory."""
    if is_accelerator(device):
        return torch.accelerator.max_memory_allocated(device)
    if _STATUS.exists():  # what getrusage says on Linux includes the process that started this one
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
