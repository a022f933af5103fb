"""Stream: brings named tensors of all ranks of replica 0 to rank 0, whole and one at a time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fold3d.checkpoint.arrivals import Arrival, Entry, Offer, Request, arrange
from fold3d.checkpoint.relay import Relay
from fold3d.comms.family import as_bytes
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard

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
    """A channel from all ranks of replica 0 to rank 0, which holds one whole tensor at a time, over `world`'s trees: so
    rank 0 is connected with a few others, however many send. A rank that sends or passes on holds what it sends of two.

    Tensors travel through host memory: that is where they are written from. Of a tensor that is spread over a
    tensor-parallel group each index travels once, from the first rank that holds it; of others the first rank sends.
    """

    def __init__(self, world: WorldGroup, patience: float) -> None:
        """Args:
        patience: seconds to wait for a rank; the last one's turn comes when all others have been written.
        """
        self._topology, self._world, self._patience = world.topology, world, patience

    def send(
        self, own: Mapping[Key, Tensor], note: Any, sink: Sink[Key], spread: Mapping[Key, Shard] | None = None
    ) -> None:
        """Brings `own` and `note` of every rank to `sink` on rank 0. Every rank of replica 0 must call it.

        Ranks of other replicas may call it: nothing happens there. A name given by two stages is taken from
        the earlier one.

        Args:
            spread: those of `own` that are parts, with how they are spread over the ranks of this one's stage.
        Raises: what a rank cannot read, there, and then CheckpointError on rank 0; there also when a shard has no part
            of what others have, and what the sink raises.
        """
        if self._topology.dp_rank != 0:
            return
        entries = {name: Entry.of(tensor) for name, tensor in own.items()}
        offer = Offer(entries, {name: shard for name, shard in (spread or {}).items() if name in entries}, note)
        offers = self._world.gather_replica(offer, timeout=self._patience)
        relay = Relay(self._world, self._patience)
        if offers is not None:
            self._receive(own, offers, sink, relay)
        else:
            self._pass_on(own, relay)

    def _pass_on(self, own: Mapping[Key, Tensor], relay: Relay) -> None:
        arrivals: list[Arrival[Key]] = self._world.share_replica(None, timeout=self._patience)
        error: Exception | None = None
        for source, request, size in [
            (source, request, size)
            for arrival in arrivals
            for source, request in arrival.sources
            if (size := arrival.bytes_of(request)) and relay.is_on_way(source)
        ]:
            data: Tensor | None = None
            if source == self._topology.rank and error is None:
                try:
                    data = as_bytes(_cut(own[request.name].detach(), request)).cpu()
                except Exception as failure:  # the others wait for something of this size
                    error = failure
            relay.bring(torch.empty(size, dtype=torch.uint8) if data is None else data, source)
            del data  # before the next one takes memory
        relay.end()
        self._world.gather_replica("" if error is None else f"{type(error).__name__}: {error}", timeout=self._patience)
        if error is not None:
            raise error

    def _receive(self, own: Mapping[Key, Tensor], offers: list[Offer[Key]], sink: Sink[Key], relay: Relay) -> None:
        error: Exception | None = None
        arrivals: list[Arrival[Key]] = []
        try:
            arranged = arrange(offers, self._topology)
            sink.open({arrival.name: arrival.entry for arrival in arranged}, [offer.note for offer in offers])
            arrivals = arranged
        except Exception as failure:  # the others wait to be told what to send
            error = failure
        self._world.share_replica(arrivals, timeout=self._patience)
        for arrival in arrivals:
            tensor = _assemble(arrival, own, relay)
            if error is not None:
                continue  # the others have been told to send: all of it is taken
            try:
                sink.write(arrival.name, tensor)
            except Exception as failure:
                error = failure
            del tensor  # before the next one takes memory
        failures = self._world.gather_replica("", timeout=self._patience) or []
        if error is not None:
            raise error
        for rank, reason in enumerate(failures):
            if reason:
                raise CheckpointError(f"rank {rank} could not send its tensors: {reason}")
        sink.close()


def _assemble(arrival: Arrival[Key], own: Mapping[Key, Tensor], relay: Relay) -> Tensor:
    """Returns a whole tensor on rank 0."""
    if any(source == 0 and request.pieces is None for source, request in arrival.sources):
        return own[arrival.name]
    whole = torch.empty(arrival.entry.shape, dtype=arrival.entry.dtype)
    for source, request in arrival.sources:
        if request.pieces is None:
            _take(whole, source, relay)
            continue
        places = [whole.narrow(request.dim, first, end - first) for _, first, end in request.pieces]
        if source == 0:
            data = _cut(own[arrival.name].detach(), request)
        elif len(places) == 1 and places[0].is_contiguous():
            _take(places[0], source, relay)
            continue
        else:
            data = torch.empty(arrival.shape_of(request), dtype=whole.dtype)
            _take(data, source, relay)
        start = 0
        for place in places:
            width = place.shape[request.dim]
            place.copy_(data.narrow(request.dim, start, width))
            start += width
    return whole


def _take(tensor: Tensor, source: int, relay: Relay) -> None:
    """Fills a contiguous tensor in host memory with what a rank sends."""
    if tensor.numel():
        relay.bring(as_bytes(tensor), source)


def _cut(part: Tensor, request: Request[Any]) -> Tensor:
    """Returns what is asked for of a part, the pieces one after the other."""
    if request.pieces is None:
        return part
    pieces = [part.narrow(request.dim, place, end - first) for place, first, end in request.pieces]
    return torch.cat(pieces, request.dim) if len(pieces) > 1 else pieces[0]
