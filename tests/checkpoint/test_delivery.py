"""Tensors of every rank come into the files; what fails on one rank fails everywhere and leaves nobody waiting."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fold3d.checkpoint import Delivery, WeightsFiles, delivery, regions_of, sees_folder, together
from fold3d.checkpoint import regions as regions_module
from fold3d.checkpoint.regions import Box, Entry
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


@contextlib.contextmanager
def replicas(dp: int, tp: int = 1) -> Iterator[WorldGroup]:
    """All ranks, in as many stages as they fill."""
    world = WorldGroup(Topology(dp=dp, pp=dist.get_world_size() // (dp * tp), tp=tp, rank=dist.get_rank()), 30)
    try:
        yield world
        world.barrier()
    finally:
        world.close()


FUSED = Shard(0, 6, (((0, 2), (4, 6)), ((2, 4), (4, 6))))
COLUMNS = Shard(1, 5, (((3, 5),), ((0, 3),)))
NOTHING = Shard(0, 3, ((), ((0, 3),)))
WHOLE = {
    "fused": torch.arange(12.0).reshape(6, 2),
    "columns": torch.arange(10).reshape(2, 5).bfloat16(),
    "nothing": torch.arange(3, dtype=torch.float64),
    "even": torch.arange(24.0).reshape(4, 2, 3),
}
SPREAD = {"fused": FUSED, "columns": COLUMNS, "nothing": NOTHING, "even": Shard.even(0, 4, 2)}


def own(topology: Topology) -> list[Box[str]]:
    """Returns what a rank of two shards has of the tensors of its stage."""
    stage, shard = topology.pp_rank, topology.tp_rank
    return [
        region
        for name, whole in WHOLE.items()
        for region in regions_of(f"{name}{stage}", SPREAD[name].take(whole + stage, shard), SPREAD[name], shard)
    ]


def check(read: Mapping[str, Tensor], stages: int) -> None:
    assert set(read) == {f"{name}{stage}" for name in WHOLE for stage in range(stages)}
    for stage in range(stages):
        for name, tensor in WHOLE.items():
            assert read[f"{name}{stage}"].dtype == tensor.dtype
            assert torch.equal(read[f"{name}{stage}"], tensor + stage), name


def save(folder: str, dp: int, is_shared: bool) -> int:
    """Returns how many bytes of tensors this rank has written."""
    written = 0

    def counted(descriptor: int, begin: int, whole: Any, starts: Any, data: Tensor) -> None:
        nonlocal written
        written += data.nbytes
        regions_module.write_box(descriptor, begin, whole, starts, data)

    small = mock.patch.object(regions_module, "_SMALL", 0)
    with replicas(dp, tp=2) as world, mock.patch.object(delivery, "write_box", counted), small:
        made = Delivery(world, 30, is_shared=is_shared)
        with together("saving", world, 30):
            made.to_files(own(world.topology), None, WeightsFiles(Path(folder)))
        with together("saving", world, 30):
            if world.topology.rank == 0:
                made.finish()
    return written


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("is_shared", [True, False])
def test_parts_of_all_ranks_become_whole(ranks: RankPool, tmp_path: Path, dp: int, pp: int, is_shared: bool) -> None:
    written = ranks.run(save, 2 * dp * pp, str(tmp_path), dp, is_shared)
    check(load_file(tmp_path / "model.safetensors"), pp)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    total = pp * sum(tensor.nbytes for tensor in WHOLE.values())
    assert sum(written) == total
    if is_shared:
        assert all(written) and max(written) < total
    else:
        assert written[0] == total


def collect(dp: int) -> dict[str, Tensor]:
    with replicas(dp, tp=2) as world:
        return Delivery(world, 30, is_shared=True).to_rank_0(own(world.topology))


def test_what_one_rank_needs_whole(ranks: RankPool) -> None:
    first, *others = ranks.run(collect, 4, 1)
    check(first, 2)
    assert others == [{}, {}, {}]


def of_replicas(folder: str, is_shared: bool) -> None:
    """Each of four replicas alone has a row."""
    with replicas(4) as world, together("saving", world, 30):
        rank = world.topology.rank
        mine = Box("rows", (4, 3), (rank, 0), torch.full((1, 3), float(rank)))
        made = Delivery(world, 30, is_shared=is_shared)
        made.to_files([], None, WeightsFiles(Path(folder)), [mine])
        world.barrier()
        if rank == 0:
            made.finish()


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_one_replica_alone_has(ranks: RankPool, tmp_path: Path, is_shared: bool) -> None:
    ranks.run(of_replicas, 4, str(tmp_path), is_shared)
    assert load_file(tmp_path / "model.safetensors")["rows"].tolist() == [[float(k)] * 3 for k in range(4)]


def fail_on(rank: int, folder: str, is_shared: bool, doing: str) -> str:
    """A disk that is full, or memory that cannot be read, on one rank."""
    error = OSError(28, "No space left on device")
    failing: Any = contextlib.nullcontext()
    if dist.get_rank() == rank:
        target = {"make": WeightsFiles, "write": delivery.Writer, "box_of": delivery}[doing]
        failing = mock.patch.object(target, doing, side_effect=error)
    with replicas(dp=1, tp=2) as world:
        try:
            with together("saving", world, 30), failing:
                Delivery(world, 30, is_shared=is_shared).to_files(own(world.topology), None, WeightsFiles(Path(folder)))
        except (OSError, CheckpointError) as failure:
            return f"{type(failure).__name__}: {failure}"
    return "no error"


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(
    ("rank", "is_shared", "doing"),
    [(0, True, "make"), (2, True, "write"), (0, False, "make"), (0, False, "write"), (2, False, "box_of")],
)
def test_a_failure_of_one_is_told_to_all(
    ranks: RankPool, tmp_path: Path, rank: int, is_shared: bool, doing: str
) -> None:
    errors = ranks.run(fail_on, 4, rank, str(tmp_path), is_shared, doing)
    told = f"CheckpointError: saving failed on rank {rank}: OSError: [Errno 28] No space left on device"
    assert errors == [told if k != rank else "OSError: [Errno 28] No space left on device" for k in range(4)]
    assert not (tmp_path / "model.safetensors").exists()


def without_a_part() -> str:
    with replicas(1, tp=2) as world:
        rank = world.topology.tp_rank
        mine = regions_of("even", torch.zeros(2, 2, 3), SPREAD["even"], rank) if rank == 0 else []
        try:
            with together("saving", world, 30):
                Delivery(world, 30, is_shared=True).to_files(mine, None, WeightsFiles(Path("/nowhere")))
        except CheckpointError as error:
            return str(error)
    return "no error"


def test_a_shard_without_its_part_is_told(ranks: RankPool) -> None:
    errors = ranks.run(without_a_part, 2)
    assert all("all ranks together have 12 elements of even, which has 24" in error for error in errors), errors


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    world = WorldGroup(Topology(dp=1, pp=1, rank=0), 30)
    files = WeightsFiles(tmp_path / "new")
    usage = mock.patch("shutil.disk_usage", return_value=mock.Mock(free=39))
    with usage, pytest.raises(OSError, match="do not fit"):
        Delivery(world, 30, is_shared=True).to_files(regions_of("w", torch.zeros(10), None, 0), None, files)
    assert list(tmp_path.iterdir()) == []


def look(folders: list[str]) -> bool:
    with replicas(1) as world:
        return sees_folder(Path(folders[world.topology.rank]), world, 30)


def test_a_folder_of_one_host_is_found_out(ranks: RankPool, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    assert ranks.run(look, 2, [str(mine)] * 2) == [True, True]
    assert ranks.run(look, 2, [str(mine), str(other)]) == [False, False]
    assert not list(mine.iterdir()) and not list(other.iterdir())


class Watching(WeightsFiles):
    """Files of which nothing is kept."""

    def __init__(self) -> None:
        super().__init__(Path("/dev"))

    def make(self, entries: Mapping[str, Entry], notes: list[Any]) -> dict[str, Any]:
        return {name: delivery.Location("null", 0) for name in entries}


def tensors() -> int:
    """Returns the bytes of memory that is not on disk."""
    gc.collect()
    found = {t.untyped_storage().data_ptr(): t for t in gc.get_objects() if isinstance(t, Tensor) and t.numel() > 1000}
    return sum(t.untyped_storage().nbytes() for t in found.values())


def watch_memory(is_shared: bool) -> int:
    """Returns how many bytes more there are at most while tensors are written, 4 MB by each of two shards."""
    most = 0

    def watched(*_: Any) -> None:
        nonlocal most
        most = max(most, tensors())

    small, writing = (
        mock.patch.object(regions_module, "WINDOW", 100_000),
        mock.patch.object(regions_module, "_write", watched),
    )
    with replicas(1, tp=2) as world, small, writing, mock.patch("os.fsync"):
        shard = Shard.even(1, 500, 2)
        parts = {f"{n}": torch.zeros(1000, 250) for n in range(4)}
        mine = [r for name, part in parts.items() for r in regions_of(name, part, shard, world.topology.tp_rank)]
        before = tensors()
        Delivery(world, 30, is_shared=is_shared).to_files(mine, None, Watching())
        return most - before


@pytest.mark.parametrize("is_shared", [True, False])
def test_no_rank_holds_more_than_its_part_and_a_window(ranks: RankPool, is_shared: bool) -> None:
    assert max(ranks.run(watch_memory, 2, is_shared)) <= 3 * 100_000
