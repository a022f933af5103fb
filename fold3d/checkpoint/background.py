"""Background: what a save is made of on one rank; copied and written while training goes on, or written at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fold3d.checkpoint.delivery import Delivery, Files, Key
from fold3d.checkpoint.regions import Box, spread_over
from fold3d.data_parallel.optimizer.host_memory import host_memory
from fold3d.device import synchronize
from fold3d.topology import Topology

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank brings into some files; fields as the arguments of `Delivery.to_files`."""

    everywhere: Sequence[Box[Any]]
    note: Any
    files: Files[Any]
    own: Sequence[Box[Any]]

    def deliver(self, delivery: Delivery) -> None:
        """Brings it there; every rank calls. Raises: as `Delivery.to_files`."""
        delivery.to_files(self.everywhere, self.note, self.files, self.own)


class Background:
    """Of one rank. One save at a time: `to_files` says what is written; then `take` returns it, or `start` has copies
    of it written in a thread, until `finish`.

    On a CPU the thread makes the copies, too: until `wait_for_copies` has returned nobody may change what was given to
    `to_files`. They lie in one buffer, in pinned memory beside a GPU, which the next save uses again. An interpreter
    that ends does not wait for the thread.
    """

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: of what is written.
        """
        self._device = device
        self._parts: list[Part] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def to_files(
        self, everywhere: Sequence[Box[Key]], note: Any, files: Files[Key], own: Sequence[Box[Key]] = ()
    ) -> None:
        """Notes what will be written; arguments as for `Delivery.to_files`."""
        self._parts.append(Part(everywhere, note, files, own))

    def take(self) -> list[Part]:
        """Returns what was noted since the last call, which lies where it lay."""
        parts, self._parts = self._parts, []
        return parts

    def start(self, topology: Topology, write: Callable[[list[Part]], None]) -> None:
        """Begins to copy what was noted, and then to write the copies.

        Args:
            topology: of this rank, which copies its share of what all replicas have.
            write: is given the copies, in the thread.
        """
        parts, pairs, place = [], [], 0
        for part in self.take():
            mine = []
            for region in (*spread_over(part.everywhere, topology.dp, topology.dp_rank), *part.own):
                pairs.append((region, place))
                mine.append(len(pairs) - 1)
                place += -(-region.data.nbytes // _ALIGN) * _ALIGN
            parts.append((part, mine))
        if place > self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one is free before the new one is made
            with host_memory():
                self._buffer = torch.empty(place, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        copies = [_room_for(region, self._buffer[at:]) for region, at in pairs]
        sources = [region.data.detach() for region, _ in pairs]
        copied = [Part([], part.note, part.files, [copies[k] for k in mine]) for part, mine in parts]
        self._copied.clear()
        if self._device.type != "cpu":
            self._copy(sources, copies)
        arguments = (sources, copies, lambda: write(copied))
        self._thread = threading.Thread(target=self._run, args=arguments, name="fold3d save", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Of host memory that copies take."""
        return self._buffer.nbytes

    def _copy(self, sources: list[Tensor], copies: list[Box[Any]]) -> None:
        try:
            for source, copy in zip(sources, copies, strict=True):
                copy.data.copy_(source, non_blocking=True)
            synchronize(self._device)
        finally:
            sources.clear()
            self._copied.set()

    def _run(self, sources: list[Tensor], copies: list[Box[Any]], write: Callable[[], None]) -> None:
        try:
            if not self._copied.is_set():
                self._copy(sources, copies)
            write()
        except Exception as failure:
            self._error = failure

    def wait_for_copies(self, patience: float) -> None:
        """Returns when what is being saved may change. Raises: TimeoutError after `patience` seconds."""
        if not self._copied.wait(patience):
            raise TimeoutError(f"what a checkpoint is made of was not copied within {patience:g} s (ddp_timeout)")

    @property
    def is_writing(self) -> bool:
        """Whether it is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, patience: float | None = None) -> None:
        """Waits for the end; then, or where nothing was begun, another save may be noted.

        Args:
            patience: seconds; None: without an end.
        Raises: what the writing raised; TimeoutError.
        """
        self._parts.clear()
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


def _room_for(region: Box[Key], buffer: Tensor) -> Box[Key]:
    """Returns the region with its values, which are not there yet, at the beginning of `buffer`."""
    data = region.data
    return Box(region.key, region.whole, region.starts, buffer[: data.nbytes].view(data.dtype).view(data.shape))
