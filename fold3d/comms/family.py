"""Family: the few ranks that are directly connected in a tree of ranks, and what they bring to its top and back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from fold3d.comms import abortable_collectives
from fold3d.comms.shared_gloo import connect_few
from fold3d.faults.progress import Progress


class Family:
    """Some ranks with gloo connections of their own, each with each; the first of them is the top.

    All of them construct it and make the same calls in the same order. What travels is bytes in host memory.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, timeout: float):
        """Args:
        ranks: in the job, two or more, with `rank`, this process's, among them.
        name: the same for all of them, given to no other family of the job's store.
        timeout: seconds until a rank that does not come is an error.
        Raises: DistNetworkError when one does not come.
        """
        self._ranks, self._own = list(ranks), list(ranks).index(rank)
        self._waits = False  # a call that was given up is still under way
        self._group: Any = None
        try:
            self._group = connect_few(name, self._own, len(ranks), timedelta(seconds=timeout))
        except RuntimeError as error:
            raise dist.DistNetworkError(f"{self._others()} did not connect within {timeout:g} s: {error}") from error
        # gloo is done with this rank before the others are done with it: one that closes at once would fail them.
        self.sizes(0, timeout, Progress())

    def gather(self, block: Tensor, timeout: float, progress: Progress) -> list[Tensor]:
        """Returns everybody's `block`, uint8 and of one size, in the order of the ranks, at the top; else nothing."""
        options = dist.GatherOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout)
        blocks = [torch.empty_like(block) for _ in self._ranks] if self._own == 0 else []
        self._finish(lambda: self._group.gather([blocks] if blocks else [], [block], options), timeout, progress)
        return blocks

    def sizes(self, size: int, timeout: float, progress: Progress) -> list[int]:
        """Returns everybody's `size`, in the order of the ranks, to all."""
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        found = [torch.empty(1, dtype=torch.int64) for _ in self._ranks]
        self._finish(lambda: self._group.allgather([found], [torch.tensor([size])], options), timeout, progress)
        return [int(one) for one in found]

    def spread(self, block: Tensor, timeout: float, progress: Progress, source: int = 0) -> None:
        """Fills everybody's `block`, uint8 and of one size, with that of the rank at place `source`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, timedelta(seconds=timeout)
        self._finish(lambda: self._group.broadcast([block], options), timeout, progress)

    def send(self, data: Tensor, timeout: float) -> Callable[[], None]:
        """Sends `data`, uint8 and at least one, to the top alone; returns what waits until it has left."""
        return self._waiting(self._group.send([data], 0, 0), 0, timeout)

    def receive(self, data: Tensor, source: int, timeout: float) -> None:
        """Fills `data` with what the rank at place `source` sends to this one, the top; waits for it."""
        self._waiting(self._group.recv([data], source, 0), source, timeout)()

    def _waiting(self, work: Any, other: int, timeout: float) -> Callable[[], None]:
        def wait() -> None:
            try:
                work.wait(timedelta(seconds=timeout))
            except RuntimeError as error:
                raise dist.DistNetworkError(
                    f"rank {self._ranks[other]} cannot be reached, or did not come within {timeout:g} s (gloo: {error})"
                ) from error

        return wait

    def close(self) -> None:
        """Ends the connections; does nothing the second time."""
        group, self._group = self._group, None
        if group is not None and self._waits:
            # Nothing ends the thread before its time limit, and whoever destroys the group waits for the thread.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def __del__(self) -> None:
        self.close()

    def _finish(self, start: Callable[[], Any], timeout: float, progress: Progress) -> None:
        self._waits = True
        try:
            abortable_collectives.finish(start(), progress)
        except RuntimeError as error:
            if progress.life.failure is not None:
                raise
            raise dist.DistNetworkError(
                f"{self._others()} cannot be reached, or did not come within {timeout:g} s (gloo: {error})"
            ) from error
        self._waits = False

    def _others(self) -> str:
        others = [rank for place, rank in enumerate(self._ranks) if place != self._own]
        return f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements of `tensor` as a flat uint8 tensor: [number of elements * element size]."""
    dense = tensor.detach().contiguous()
    # Not reshape(-1): of one element, which counts as contiguous with any strides, it keeps them.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
