"""Stream: brings named tensors of all ranks of replica 0 to rank 0, whole and one at a time."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.checkpoint.arrivals import Arrival, Entry, Offer, Request, arrange
from fold3d.comms.broadcast import as_bytes
from fold3d.sharding.shard import Shard
from fold3d.topology import Topology

Key = TypeVar("Key", bound=Hashable)
KeyIn = TypeVar("KeyIn", bound=Hashable, contravariant=True)


class Sink(Protocol[KeyIn]):
    """Takes the tensors on rank 0. Whatever it raises is raised on rank 0 after all tensors have arrived."""

    def open(self, entries: Mapping[Any, Entry], notes: list[Any]) -> None:
        """Called once: everything that will come, and the note of each rank of the replica, in their order."""

    def write(self, name: KeyIn, tensor: Tensor) -> None:
        """Called for each entry; the tensor is only valid during the call."""

    def close(self) -> None:
        """Called after the last tensor."""


class Stream(Generic[Key]):
    """A channel from all ranks of replica 0 to rank 0; never more than one whole tensor in flight.

    Tensors travel through host memory: that is where they are written from. Of a tensor that is spread over a
    tensor-parallel group each index travels once, from the first rank that holds it; of others the first rank sends.
    """

    def __init__(self, topology: Topology, group: dist.ProcessGroup | None, patience: float) -> None:
        """Args:
        group: all ranks of the replica, able to carry host memory; None when it is one.
        patience: seconds to wait for a rank; the last one's turn comes when all others have been written.
        """
        self._topology, self._group, self._patience = topology, group, timedelta(seconds=patience)

    def send(
        self, own: Mapping[Key, Tensor], note: Any, sink: Sink[Key], spread: Mapping[Key, Shard] | None = None
    ) -> None:
        """Brings `own` and `note` of every rank to `sink` on rank 0. Every rank of replica 0 must call it.

        Ranks of other replicas may call it: nothing happens there. A name given by two stages is taken from
        the earlier one.

        Args:
            spread: those of `own` that are parts, with how they are spread over the ranks of this one's stage.
        Raises: on rank 0 what the sink raises; CheckpointError when a shard has no part of what others have.
        """
        if self._topology.dp_rank != 0:
            return
        entries = {name: Entry.of(tensor) for name, tensor in own.items()}
        offer = Offer(entries, {name: shard for name, shard in (spread or {}).items() if name in entries}, note)
        if self._topology.rank == 0:
            self._receive(own, offer, sink)
            return
        dist.gather_object(offer, None, dst=0, group=self._group)
        for request in self._take_requests():
            data = as_bytes(_cut(own[request.name].detach(), request)).cpu()
            if data.numel():
                self._wait(dist.isend(data, dst=0, group=self._group))
            del data  # before the next one takes memory

    def _receive(self, own: Mapping[Key, Tensor], offer: Offer[Key], sink: Sink[Key]) -> None:
        others = self._topology.replica(0)[1:]
        offers: list[Any] = [offer, *(None for _ in others)]
        if others:
            dist.gather_object(offer, offers, dst=0, group=self._group)
        error: Exception | None = None
        arrivals: list[Arrival[Key]] = []
        try:
            arranged = arrange(offers, self._topology)
            sink.open({arrival.name: arrival.entry for arrival in arranged}, [offer.note for offer in offers])
            arrivals = arranged
        except Exception as failure:  # the others wait to be told what to send
            error = failure
        for rank in others:
            self._tell(rank, [request for a in arrivals for source, request in a.sources if source == rank])
        for arrival in arrivals:
            tensor = self._assemble(arrival, own)
            if error is not None:
                continue  # the others have been told to send: all of it is taken
            try:
                sink.write(arrival.name, tensor)
            except Exception as failure:
                error = failure
            del tensor  # before the next one takes memory
        if error is not None:
            raise error
        sink.close()

    def _assemble(self, arrival: Arrival[Key], own: Mapping[Key, Tensor]) -> Tensor:
        if any(source == 0 and request.pieces is None for source, request in arrival.sources):
            return own[arrival.name]
        whole = torch.empty(arrival.entry.shape, dtype=arrival.entry.dtype)
        for source, request in arrival.sources:
            if request.pieces is None:
                self._take(whole, source)
                continue
            places = [whole.narrow(request.dim, first, end - first) for _, first, end in request.pieces]
            if source == 0:
                data = _cut(own[arrival.name].detach(), request)
            elif len(places) == 1 and places[0].is_contiguous():
                self._take(places[0], source)
                continue
            else:
                width = sum(place.shape[request.dim] for place in places)
                data = whole.new_empty((*whole.shape[: request.dim], width, *whole.shape[request.dim + 1 :]))
                self._take(data, source)
            start = 0
            for place in places:
                width = place.shape[request.dim]
                place.copy_(data.narrow(request.dim, start, width))
                start += width
        return whole

    def _take(self, tensor: Tensor, source: int) -> None:
        """Fills a contiguous tensor in host memory with what a rank sends."""
        if tensor.numel():
            self._wait(dist.irecv(as_bytes(tensor), src=source, group=self._group))

    def _tell(self, rank: int, requests: list[Request[Key]]) -> None:
        packed = torch.frombuffer(bytearray(pickle.dumps(requests)), dtype=torch.uint8)
        self._wait(dist.isend(torch.tensor([packed.numel()]), dst=rank, group=self._group))
        self._wait(dist.isend(packed, dst=rank, group=self._group))

    def _take_requests(self) -> list[Request[Key]]:
        size = torch.zeros(1, dtype=torch.int64)
        self._take(size, 0)
        packed = torch.empty(int(size), dtype=torch.uint8)
        self._take(packed, 0)
        requests: list[Request[Key]] = pickle.loads(bytes(packed.numpy()))
        return requests

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait(self._patience)


def _cut(part: Tensor, request: Request[Any]) -> Tensor:
    """Returns what is asked for of a part, the pieces one after the other."""
    if request.pieces is None:
        return part
    pieces = [part.narrow(request.dim, place, end - first) for place, first, end in request.pieces]
    return torch.cat(pieces, request.dim) if len(pieces) > 1 else pieces[0]
