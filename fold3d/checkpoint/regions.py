"""Regions: which box of which whole tensor a rank writes into a file, or reads from it, and how boxes lie in a file."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fold3d.comms.tree_group import as_bytes
from fold3d.data_parallel.bucket import Piece, memory_order
from fold3d.sharding.shard import Shard, even_part
from fold3d.weights.safetensors_file import fill

Key = TypeVar("Key", bound=Hashable)
Index = tuple[int, ...]
WINDOW = 1 << 25
"""Bytes that are copied at once, from a device, for a file or for another rank."""
_SMALL = 1 << 16
"""Bytes of a tensor that is not worth being divided over replicas."""


@dataclass(frozen=True, slots=True)
class Entry:
    """dtype and shape of a whole tensor in a file."""

    dtype: torch.dtype
    shape: Index

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """Returns the entry that describes `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Box(Generic[Key]):
    """A box of a whole tensor, and its values on this rank."""

    key: Key
    whole: Index
    """Shape of the whole tensor."""
    starts: Index
    data: Tensor
    """Of the box's shape, on any device, with any strides. It is this rank's own memory, not a copy."""

    def narrow(self, dim: int, first: int, end: int) -> Box[Key]:
        """Returns indices [first, end) of dimension `dim` of the box."""
        starts = (*self.starts[:dim], self.starts[dim] + first, *self.starts[dim + 1 :])
        return Box(self.key, self.whole, starts, self.data.narrow(dim, first, end - first))


def regions_of(key: Key, part: Tensor, shard: Shard | None, rank: int) -> list[Box[Key]]:
    """Returns what a rank of a tensor-parallel group writes of a tensor of which it has `part`: over all ranks of the
    group, each element once.

    Args:
        shard: how the tensor is spread over the group; None: this rank writes all of it.
    """
    whole = tuple(part.shape) if shard is None else shard.whole_shape(part.shape)
    return list(_in_whole(Box(key, whole, (0,) * part.ndim, part), shard, rank, once=True))


def regions_of_piece(
    key: Key, piece: Piece, flat: Tensor, shard: Shard | None, rank: int, *, once: bool
) -> list[Box[Key]]:
    """Returns the regions of a piece of a parameter, or of what has a value for each of its elements.

    Args:
        flat: [piece.stop - piece.start], as the piece lies in its bucket.
        shard: how the parameter is spread over the tensor-parallel group.
        once: without elements that a lower rank of the group has, too.
    """
    shape = tuple(piece.parameter.shape)
    order = memory_order(piece.parameter)
    whole = shape if shard is None else shard.whole_shape(shape)
    found: list[Box[Key]] = []
    place = 0
    for starts, extents in boxes([shape[d] for d in order], piece.offset, piece.offset + flat.numel()):
        size = math.prod(extents)
        data = flat[place : place + size].view(extents).permute([order.index(d) for d in range(len(order))])
        place += size
        at = tuple(starts[order.index(d)] for d in range(len(order)))
        found += _in_whole(Box(key, whole, at, data), shard, rank, once=once)
    return found


def _in_whole(region: Box[Key], shard: Shard | None, rank: int, *, once: bool) -> Iterator[Box[Key]]:
    """Yields a box of a rank's part as boxes of the whole tensor."""
    if shard is None or not region.data.ndim:
        yield region
        return
    dim, begin = shard.dim, region.starts[shard.dim]
    for place, first, end in shard.first_held(rank) if once else _held(shard, rank):
        low, high = max(place, begin), min(place + end - first, begin + region.data.shape[dim])
        if low < high:
            some = region.narrow(dim, low - begin, high - begin)
            starts = (*some.starts[:dim], first + low - place, *some.starts[dim + 1 :])
            yield Box(some.key, some.whole, starts, some.data)


def _held(shard: Shard, rank: int) -> Iterator[tuple[int, int, int]]:
    """Yields all pieces of a rank's part as `Shard.first_held` does."""
    place = 0
    for first, end in shard.parts[rank]:
        yield place, first, end
        place += end - first


def spread_over(regions: Sequence[Box[Key]], replicas: int, replica: int) -> list[Box[Key]]:
    """Returns what one of several replicas that all have `regions` writes of them: each element is written by one."""
    mine: list[Box[Key]] = []
    for number, region in enumerate(regions):
        shape = region.data.shape
        dim = next((d for d, size in enumerate(shape) if size >= replicas), None)
        if dim is None or region.data.nbytes < _SMALL or replicas == 1:
            mine += [region] if number % replicas == replica else []
            continue
        mine.append(region.narrow(dim, *even_part(shape[dim], replicas, replica)))
    return mine


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Index, Index]]:
    """Yields elements [start, stop) of a row-major tensor of this shape as boxes (starts, extents), in their order: at
    most two for each dimension, less one."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _within_row(shape, first, head, tail)
        return
    if head:
        yield from _within_row(shape, first, head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within_row(shape, last, 0, tail)


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Index, Index]]:
    for starts, extents in boxes(shape[1:], start, stop):
        yield (row, *starts), (1, *extents)


def windows(shape: Sequence[int], itemsize: int) -> Iterator[tuple[Index, Index]]:
    """Yields a box of this shape as boxes (starts, extents) of at most `WINDOW` bytes, in row-major order."""
    dim = next((d for d, size in enumerate(shape) if size > 1), None)
    size = itemsize * math.prod(shape)
    if dim is None or size <= WINDOW:
        yield (0,) * len(shape), tuple(shape)
        return
    step = max(1, WINDOW * shape[dim] // size)
    for first in range(0, shape[dim], step):
        part = (*shape[:dim], min(step, shape[dim] - first), *shape[dim + 1 :])
        for starts, extents in windows(part, itemsize):
            yield (*starts[:dim], first + starts[dim], *starts[dim + 1 :]), extents


def box_of(data: Tensor, starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Returns the box of `data` that begins at `starts`, as a view."""
    for dim, (first, size) in enumerate(zip(starts, extents, strict=True)):
        data = data.narrow(dim, first, size)
    return data


def write_box(descriptor: int, begin: int, whole: Sequence[int], starts: Sequence[int], data: Tensor) -> None:
    """Writes a box to its places in a file, a window of `WINDOW` bytes after the other.

    Args:
        begin: place of the whole tensor's first byte in the file; row by row, of the dtype of `data`.
        whole: its shape.
        starts: of the box.
        data: the box's values.
    Raises: OSError.
    """
    for offsets, extents in windows(data.shape, data.element_size()):
        window = box_of(data.detach(), offsets, extents).cpu()
        at = [first + offset for first, offset in zip(starts, offsets, strict=True)]
        view = as_bytes(window).numpy().data
        for place, run in _runs(whole, at, extents, data.element_size()):
            _write(descriptor, view[:run], begin + place)
            view = view[run:]


def read_box(descriptor: int, begin: int, whole: Sequence[int], starts: Sequence[int], data: Tensor) -> None:
    """Fills a tensor in host memory with a box of a tensor in a file; arguments as for `write_box`.

    Raises: EOFError when the file ends before, OSError.
    """
    for offsets, extents in windows(data.shape, data.element_size()):
        target = box_of(data, offsets, extents)
        window = target if target.is_contiguous() else torch.empty(extents, dtype=data.dtype)
        at = [first + offset for first, offset in zip(starts, offsets, strict=True)]
        room = window.as_strided((window.numel(),), (1,)).view(torch.uint8)
        for place, run in _runs(whole, at, extents, data.element_size()):
            fill(descriptor, room[:run], begin + place)
            room = room[run:]
        if window is not target:
            target.copy_(window)


def _runs(
    whole: Sequence[int], starts: Sequence[int], extents: Sequence[int], itemsize: int
) -> Iterator[tuple[int, int]]:
    """Yields (place, bytes) of the pieces of a box that lie together in the whole tensor, in row-major order."""
    if not math.prod(extents):
        return
    full = len(whole)  # dimensions from here on are filled by the box
    while full > 0 and extents[full - 1] == whole[full - 1]:
        full -= 1
    lead = max(full - 1, 0)
    steps = [itemsize * math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    base = sum(first * step for first, step in zip(starts, steps, strict=True))
    run = itemsize * math.prod(extents[lead:])
    for index in itertools.product(*map(range, extents[:lead])):
        yield base + sum(k * step for k, step in zip(index, steps, strict=False)), run


def _write(descriptor: int, view: Any, place: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, place)
        view, place = view[count:], place + count
