"""Arrivals: which rank sends what of each tensor that goes to rank 0, decided there from what all of them have."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fold3d.data_parallel.optimizer.parameter_state import check_complete
from fold3d.sharding.shard import Shard
from fold3d.topology import Topology

Key = TypeVar("Key", bound=Hashable)
Pieces = tuple[tuple[int, int, int], ...]
"""(place in the part, first, end) along a shard's dimension, see `Shard.first_held`."""


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


@dataclass(frozen=True, slots=True)
class Offer(Generic[Key]):
    """What one rank has."""

    entries: dict[Key, Entry]
    spread: dict[Key, Shard]
    note: Any


@dataclass(frozen=True, slots=True)
class Request(Generic[Key]):
    """What one rank sends of one tensor."""

    name: Key
    dim: int
    pieces: Pieces | None
    """None: all of it."""


@dataclass(frozen=True, slots=True)
class Arrival(Generic[Key]):
    """One whole tensor, and which ranks send what of it."""

    name: Key
    entry: Entry
    sources: tuple[tuple[int, Request[Key]], ...]

    def shape_of(self, request: Request[Key]) -> tuple[int, ...]:
        """Returns the shape of what a rank sends for `request`."""
        shape = list(self.entry.shape)
        if request.pieces is not None:
            shape[request.dim] = sum(end - first for _, first, end in request.pieces)
        return tuple(shape)

    def bytes_of(self, request: Request[Key]) -> int:
        """Returns how many bytes a rank sends for `request`."""
        return Entry(self.entry.dtype, self.shape_of(request)).bytes


def arrange(offers: Sequence[Offer[Key]], topology: Topology) -> list[Arrival[Key]]:
    """Returns what will come, in this order: of what is spread each index from the first shard that holds it, of the
    rest all from the first rank that has it.

    Args:
        offers: of the ranks of replica 0, in their order.
    Raises: CheckpointError when a shard has no part of what others of its stage have.
    """
    holders: dict[Key, list[int]] = {}
    for rank, offer in enumerate(offers):
        for name in offer.entries:
            holders.setdefault(name, []).append(rank)
    arrivals: list[Arrival[Key]] = []
    for name, ranks in holders.items():
        first = ranks[0]
        entry, shard = offers[first].entries[name], offers[first].spread.get(name)
        if shard is None:
            arrivals.append(Arrival(name, entry, ((first, Request(name, 0, None)),)))
            continue
        at = [(topology.coordinates(rank), rank) for rank in ranks]
        stage = at[0][0].pp
        places = {place.tp: rank for place, rank in at if place.pp == stage}
        check_complete(str(name), places, shard)
        pieces = [(rank, shard.first_held(place)) for place, rank in places.items()]
        sources = tuple((rank, Request(name, shard.dim, some)) for rank, some in pieces if some)
        arrivals.append(Arrival(name, Entry(entry.dtype, shard.whole_shape(entry.shape)), sources))
    return arrivals
