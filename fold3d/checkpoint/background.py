"""Background: writes copies of what a save is made of while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fold3d.checkpoint.regions import Region
from fold3d.data_parallel.optimizer.host_memory import host_memory

Writes = Sequence[tuple[Any, Region[Any]]]
"""(where its tensor lies, what is written of it)."""
_ALIGN = 64


class Background:
    """Of one rank. One save at a time: `add` what is written, `start`, and `finish`, which waits for the end.

    The thread calls nothing but `write`, and touches the copies alone. They lie in one buffer, in pinned memory beside
    a GPU, which the next save uses again. An interpreter that ends does not wait for the thread.
    """

    def __init__(self, write: Callable[[Path, Writes], None], device: torch.device) -> None:
        """Args:
        write: writes all of it to disk, or raises.
        device: of what is written.
        """
        self._write, self._device = write, device
        self._added: list[tuple[Path, Writes]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def add(self, folder: Path, writes: Writes) -> None:
        """What will be written; it is not copied before `start`."""
        self._added.append((folder, writes))

    def start(self) -> int:
        """Copies all that was added, and begins to write the copies; returns the bytes of host memory they take."""
        sizes = [-(-region.data.nbytes // _ALIGN) * _ALIGN for _, writes in self._added for _, region in writes]
        if sum(sizes) > self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one is free before the new one is made
            with host_memory():
                pin = self._device.type == "cuda"
                self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin)
        copies, place = [], 0
        for folder, writes in self._added:
            mine = []
            for location, region in writes:
                data = region.data.detach()
                copy = self._buffer[place : place + data.nbytes].view(data.dtype).view(data.shape)
                copy.copy_(data, non_blocking=True)
                mine.append((location, Region(region.key, region.whole, region.starts, copy)))
                place += -(-data.nbytes // _ALIGN) * _ALIGN
            copies.append((folder, mine))
        self._added.clear()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._thread = threading.Thread(target=self._run, args=(copies,), name="fold3d save", daemon=True)
        self._thread.start()
        return self._buffer.nbytes

    def _run(self, copies: list[tuple[Path, Writes]]) -> None:
        try:
            for folder, writes in copies:
                self._write(folder, writes)
        except Exception as failure:
            self._error = failure

    @property
    def is_writing(self) -> bool:
        """Whether it is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, patience: float | None = None) -> None:
        """Waits for the end; then, or where nothing was begun, a save may be added.

        Args:
            patience: seconds; None: without an end.
        Raises: what the writing raised; TimeoutError.
        """
        self._added.clear()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(patience)
        if thread.is_alive():
            self._thread = thread
            raise TimeoutError(f"a checkpoint was not written within {patience:g} s (ddp_timeout)")
        error, self._error = self._error, None
        if error is not None:
            raise error
