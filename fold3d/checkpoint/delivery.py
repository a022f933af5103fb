"""Delivery: how the tensors of all ranks come into the files of one save; Relay: how they come to rank 0."""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fold3d.checkpoint.regions import Box, Entry, box_of, spread_over, windows, write_box
from fold3d.comms.tree_group import as_bytes
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError


class Relay:
    """Of one rank. What a rank has goes up the tree of the replicas at its place, then up that of the stages of replica
    0 at its place on the axis tp, then up that of the shards of stage 0: a rank between keeps one piece of data while
    it leaves, and takes the next one meanwhile.

    All ranks that are on the way of some data call `bring` for it, and in the same order for all data.
    """

    def __init__(self, world: WorldGroup, timeout: float) -> None:
        """Args:
        timeout: seconds to wait for a rank.
        """
        self._world, self._timeout = world, timeout
        self._left: Callable[[], None] = lambda: None

    def is_on_way(self, source: int) -> bool:
        """Whether what rank `source` has comes by here, begins here, or ends here."""
        replica, stage, shard = self._world.topology.coordinates(source)
        mine = self._world.topology
        if (stage, shard) == (mine.pp_rank, mine.tp_rank):
            return self._world.data.is_above(replica)
        if not self._world.data.is_first:
            return False
        return self._world.pipeline.is_above(stage) if shard == mine.tp_rank else self._passes_shards(shard)

    def bring(self, data: Tensor, source: int) -> None:
        """Brings `data`, bytes in host memory, at least one, from rank `source` to rank 0, on which it has come when
        this returns. Other ranks on its way give room for it, which is in use until the next call or `end`.

        Raises: DistNetworkError when a rank is gone or does not come.
        """
        replica, stage, shard = self._world.topology.coordinates(source)
        mine, pipeline, tensor = self._world.topology, self._world.pipeline, self._world.tensor
        if (stage, shard) == (mine.pp_rank, mine.tp_rank):
            self._follow(self._world.data.pass_up(data, replica, timeout=self._timeout))
        if not self._world.data.is_first:
            return
        if shard == mine.tp_rank:
            self._follow(pipeline.pass_up(data, stage, timeout=self._timeout))
        if self._passes_shards(shard):
            self._follow(tensor.pass_up(data, shard, timeout=self._timeout))

    def end(self) -> None:
        """Waits until the last data has left."""
        left, self._left = self._left, lambda: None
        left()

    def _passes_shards(self, shard: int) -> bool:
        return self._world.pipeline.is_first and self._world.tensor.is_above(shard)

    def _follow(self, left: Callable[[], None]) -> None:
        before, self._left = self._left, left
        before()


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a whole tensor lies: row by row from byte `begin` of a file of the folder."""

    file: str
    begin: int


class Files(Protocol[Key]):
    """One or several files of a save. Only rank 0 calls its methods; what they raise all ranks raise."""

    folder: Path

    def make(self, entries: Mapping[Key, Entry], notes: list[Any]) -> dict[Key, Location]:
        """Makes the files at their size, without the tensors; returns where each tensor belongs.

        Args:
            notes: of all ranks, in their order.
        """

    def finish(self) -> None:
        """Gives the files their names, once all tensors are there."""


@dataclass(frozen=True, slots=True)
class WriteItem(Generic[Key]):
    """What one rank brings of one tensor: a `Box` without its values."""

    key: Key
    entry: Entry
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, region: Box[Key]) -> WriteItem[Key]:
        """Returns the piece that describes `region`."""
        data = region.data
        return cls(region.key, Entry(data.dtype, tuple(region.whole)), tuple(region.starts), tuple(data.shape))


class Delivery:
    """Of one save. Where all hosts see its folder every rank writes what it has straight into the files, each byte
    once; of what the replicas all have each writes a share. Elsewhere rank 0 writes, and the other ranks send it what
    they have, `WINDOW` bytes at a time. Every rank of the job makes the same calls, and meets the others behind them
    (`together`), where an error of one becomes one of all.
    """

    def __init__(self, world: WorldGroup, patience: float, *, is_shared: bool) -> None:
        """Args:
        patience: seconds to wait for a rank, which may be writing.
        is_shared: what `sees_folder` found.
        """
        self._world, self._patience, self._is_shared = world, patience, is_shared
        self._files: list[Files[Any]] = []

    def to_files(
        self, everywhere: Sequence[Box[Key]], note: Any, files: Files[Key], own: Sequence[Box[Key]] = ()
    ) -> None:
        """Brings regions, and a note that pickles, of every rank into `files`.

        Args:
            everywhere: what this rank has, and those of other replicas at its place have, too.
            own: what only this replica has.
        Raises: on the rank where it happens: OSError; CheckpointError when no rank has some part of a tensor, or no
            room is left on the disk.
        """
        topology = self._world.topology
        replicas, replica = (topology.dp, topology.dp_rank) if self._is_shared else (1, topology.dp_rank)
        regions = [*spread_over(everywhere, replicas, replica), *own]
        self._files.append(files)
        shares = self._world.gather(([WriteItem.of(region) for region in regions], note), timeout=self._patience)
        made: tuple[dict[Key, Location], list[list[WriteItem[Key]]]] | None = None
        error: Exception | None = None
        if shares is not None:
            try:
                pieces = [pieces for pieces, _ in shares]
                entries = whole_entries(pieces)
                room = sum(entry.bytes for entry in entries.values())
                there = next(path for path in (files.folder, *files.folder.absolute().parents) if path.is_dir())
                if shutil.disk_usage(there).free < room:
                    raise OSError(errno.ENOSPC, f"{room:,} bytes do not fit", str(files.folder))
                locations = files.make(entries, [note for _, note in shares])
                _let_go(files.folder, locations.values())
                made = locations, [] if self._is_shared else pieces
            except Exception as failure:  # the others wait to be told
                error = failure
        made = self._world.share(made, timeout=self._patience)
        if error is not None:
            raise error
        if made is None:  # rank 0 tells when all meet
            return
        locations, pieces = made
        if not self._is_shared:
            with Writer(files.folder) as writer:
                self._gather(
                    regions, pieces, lambda p, at, data: writer.write(locations[p.key], p.entry.shape, at, data)
                )
            return
        write_all(files.folder, [(locations[region.key], region) for region in regions])

    def to_rank_0(self, regions: Sequence[Box[Key]]) -> dict[Key, Tensor]:
        """Returns the whole tensors in host memory on rank 0, nothing elsewhere: for formats that need all at once.

        Args:
            regions: what this rank has, and those of other replicas at its place have, too.
        Raises: as `to_files`.
        """
        regions = spread_over(regions, 1, self._world.topology.dp_rank)
        shares = self._world.gather([WriteItem.of(region) for region in regions], timeout=self._patience)
        pieces: list[list[WriteItem[Key]]] = self._world.share(shares, timeout=self._patience)
        whole: dict[Key, Tensor] = {}

        def put(piece: WriteItem[Key], starts: Sequence[int], data: Tensor) -> None:
            if piece.key not in whole:
                whole[piece.key] = torch.empty(piece.entry.shape, dtype=piece.entry.dtype)
            box_of(whole[piece.key], starts, data.shape).copy_(data)

        self._gather(regions, pieces, put)
        whole_entries(pieces)  # on all ranks alike
        return whole

    def _gather(self, regions: Sequence[Box[Key]], pieces: Sequence[Sequence[WriteItem[Key]]], put: Any) -> None:
        """Calls `put(piece, starts, data)` on rank 0 with all that the ranks have, a window after the other."""
        relay, rank = Relay(self._world, self._patience), self._world.topology.rank
        error: Exception | None = None
        for source, piece, number in ((s, p, n) for s, some in enumerate(pieces) for n, p in enumerate(some)):
            if not relay.is_on_way(source):
                continue
            for offsets, extents in windows(piece.shape, piece.entry.dtype.itemsize):
                data = torch.empty(extents, dtype=piece.entry.dtype)
                try:
                    if source == rank and error is None:
                        data = box_of(regions[number].data.detach(), offsets, extents).cpu().contiguous()
                except Exception as failure:  # the others wait for something of this size
                    error = failure
                if source != 0 and data.numel():
                    relay.bring(as_bytes(data), source)
                try:
                    if rank == 0 and error is None:
                        put(piece, [a + b for a, b in zip(piece.starts, offsets, strict=True)], data)
                except Exception as failure:  # the others have been told to send: all of it is taken
                    error = failure
        relay.end()
        if error is not None:
            raise error

    def finish(self) -> None:
        """Gives the files their names. Rank 0 calls it, once all ranks have met."""
        for files in self._files:
            files.finish()


class Writer:
    """Writes boxes into files of a folder that are there at their size; on disk at the end of the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> Writer:
        return self

    def write(self, location: Location, whole: Sequence[int], starts: Sequence[int], data: Tensor) -> None:
        """Writes a box of a tensor of shape `whole` that lies at `location`. Raises: OSError."""
        if location.file not in self._open:
            # Not for reading: clients of NFS write whole pages of files that they read, others' bytes among them.
            self._open[location.file] = os.open(self._folder / location.file, os.O_WRONLY)
        try:
            write_box(self._open[location.file], location.begin, whole, starts, data)
        except OSError as error:  # of a descriptor, which does not say whose
            raise OSError(error.errno, error.strerror, str(self._folder / location.file)) from error

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            for descriptor in self._open.values() if kind is None else ():
                os.fsync(descriptor)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)


def write_all(folder: Path, writes: Iterable[tuple[Location, Box[Any]]]) -> None:
    """Writes regions into files of a folder, and waits until they are on disk. Raises: OSError."""
    with Writer(folder) as writer:
        for location, region in writes:
            writer.write(location, region.whole, region.starts, region.data)


def whole_entries(pieces: Sequence[Sequence[WriteItem[Key]]]) -> dict[Key, Entry]:
    """Returns dtype and shape of every tensor that the pieces of all ranks make up.

    Raises: CheckpointError unless they make up whole tensors.
    """
    entries: dict[Key, Entry] = {}
    counts: Counter[Key] = Counter()
    for piece in (piece for some in pieces for piece in some):
        if entries.setdefault(piece.key, piece.entry) != piece.entry:
            raise CheckpointError(f"{piece.key} is {piece.entry} on one rank and {entries[piece.key]} on another")
        counts[piece.key] += math.prod(piece.shape)
    for key, entry in entries.items():
        needed = math.prod(entry.shape)
        if counts[key] != needed:
            raise CheckpointError(
                f"all ranks together have {counts[key]} elements of {key}, which has {needed}: all shards of a stage, "
                "and all replicas, must train the same parameters"
            )
    return entries


def sees_folder(folder: Path, world: WorldGroup, patience: float) -> bool:
    """Returns whether every rank sees what rank 0 writes into `folder`, which is there; every rank calls.

    Raises: OSError on rank 0.
    """
    if world.topology.world == 1:
        return True
    token: Path | None = None
    error: OSError | None = None
    if world.topology.rank == 0:
        token = folder / f".seen-{secrets.token_hex(8)}"
        try:
            token.touch()
        except OSError as failure:
            token, error = None, failure
    try:
        name = world.share(None if token is None else token.name, timeout=patience)
        seen = torch.tensor(name is not None and (folder / name).is_file())
        world.all_reduce(seen, torch.logical_and, timeout=patience)
    finally:
        if token is not None:
            token.unlink()
    if error is not None:
        raise error
    return bool(seen)


def _let_go(folder: Path, locations: Iterable[Location]) -> None:
    """Puts on disk what rank 0 has made, and keeps no page of it: a client of NFS that has one writes all of it with
    the first byte that changes, and other hosts write into the same pages."""
    for name in {location.file for location in locations}:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
