"""Stream: brings named tensors of all stages of replica 0 to rank 0, one at a time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.comms.broadcast import as_bytes
from fold3d.topology import Topology

Key = TypeVar("Key", bound=Hashable)
KeyIn = TypeVar("KeyIn", bound=Hashable, contravariant=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """dtype and shape of a tensor that will arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """Returns the entry that describes `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Sink(Protocol[KeyIn]):
    """Takes the tensors on rank 0. Whatever it raises is raised on rank 0 after all tensors have arrived."""

    def open(self, entries: Mapping[Any, Entry], notes: list[Any]) -> None:
        """Called once: everything that will come, and the note of each stage in stage order."""

    def write(self, name: KeyIn, tensor: Tensor) -> None:
        """Called for each entry; the tensor is only valid during the call."""

    def close(self) -> None:
        """Called after the last tensor."""


class Stream(Generic[Key]):
    """A channel from the stages of one replica to its stage 0; never more than one tensor in flight.

    Tensors travel through host memory: that is where they are written from.
    """

    def __init__(self, topology: Topology, group: dist.ProcessGroup | None, patience: float) -> None:
        """Args:
        group: the replica's pipeline group, able to carry host memory; None when pp = 1.
        patience: seconds to wait for a stage; the last one's turn comes when all others have been written.
        """
        self._topology, self._group, self._patience = topology, group, timedelta(seconds=patience)

    def send(self, own: Mapping[Key, Tensor], note: Any, sink: Sink[Key]) -> None:
        """Brings `own` and `note` of every stage to `sink` on rank 0. Every rank of replica 0 must call it.

        Ranks of other replicas may call it: nothing happens there. A name given by two stages is taken from
        the earlier one.
        """
        if self._topology.dp_rank != 0:
            return
        mine = ({name: Entry.of(tensor) for name, tensor in own.items()}, note)
        stages: list[Any] = [mine]
        if self._topology.pp > 1:
            stages = [None] * self._topology.pp
            receiver = stages if self._topology.pp_rank == 0 else None
            dist.gather_object(mine, receiver, dst=0, group=self._group)
        if self._topology.pp_rank != 0:
            for tensor in own.values():
                self._wait(dist.isend(as_bytes(tensor).cpu(), dst=0, group=self._group))
            return
        self._receive(own, stages, sink)

    def _receive(self, own: Mapping[Key, Tensor], stages: list[tuple[dict[Key, Entry], Any]], sink: Sink[Key]) -> None:
        first: dict[Key, int] = {}
        for stage, (entries, _) in enumerate(stages):
            for name in entries:
                first.setdefault(name, stage)
        error: Exception | None = None
        try:
            sink.open({name: stages[stage][0][name] for name, stage in first.items()}, [n for _, n in stages])
        except Exception as failure:  # the other stages are about to send: take it all, then raise
            error = failure
        for stage, (entries, _) in enumerate(stages):
            for name, entry in entries.items():
                tensor = own[name] if stage == 0 else self._take(entry, stage)
                if error is not None or first[name] != stage:
                    continue
                try:
                    sink.write(name, tensor)
                except Exception as failure:
                    error = failure
        if error is not None:
            raise error
        sink.close()

    def _take(self, entry: Entry, stage: int) -> Tensor:
        data = torch.empty(entry.bytes, dtype=torch.uint8)
        self._wait(dist.irecv(data, src=self._topology.rank_of(0, stage), group=self._group))
        return data.view(entry.dtype).reshape(entry.shape)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait(self._patience)
