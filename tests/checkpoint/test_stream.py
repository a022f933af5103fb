"""Tensors of every stage reach rank 0; what fails there fails everywhere and leaves nobody waiting."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fold3d.checkpoint import Stream, WeightsSink, together
from fold3d.checkpoint.arrivals import Entry
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


def pipeline(dp: int) -> tuple[Topology, Any]:
    """Returns this rank's place and the group of its replica."""
    topology = Topology(dp=dp, pp=dist.get_world_size() // dp, rank=dist.get_rank())
    groups = [dist.new_group(topology.pipeline(replica)) for replica in range(dp)]
    return topology, groups[topology.dp_rank]


def own(topology: Topology) -> dict[str, Tensor]:
    stage = topology.pp_rank
    return {
        f"w{stage}": torch.full((2, stage + 1), float(stage + 10 * topology.dp_rank)).bfloat16(),
        f"s{stage}": torch.tensor(stage),
        "shared": torch.full((3,), float(stage)),
    }


def send_weights(folder: str, dp: int) -> None:
    topology, group = pipeline(dp)
    stream: Stream[str] = Stream(topology, group, 30)
    with together("saving", WorldGroup(topology, 30), 30):
        stream.send(own(topology), None, WeightsSink(Path(folder)))


class Failing:
    """A disk that is full after `room` tensors."""

    def __init__(self, room: int) -> None:
        self._room = room

    def open(self, entries: Mapping[str, Entry], notes: list[Any]) -> None:
        if self._room < 0:
            raise OSError("no space left to open")

    def write(self, name: str, tensor: Tensor) -> None:
        self._room -= 1
        if self._room < 0:
            raise OSError(f"no space left for {name}")

    def close(self) -> None:
        raise AssertionError("an incomplete file was closed")


def send_to_full_disk(room: int) -> str:
    topology, group = pipeline(dp=2)
    stream: Stream[str] = Stream(topology, group, 30)
    try:
        with together("saving", WorldGroup(topology, 30), 30):
            stream.send(own(topology), None, Failing(room))
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("dp", [1, 2])
def test_tensors_of_all_stages_of_replica_0(ranks: RankPool, tmp_path: Path, dp: int) -> None:
    ranks.run(send_weights, 4, str(tmp_path), dp)
    read = load_file(tmp_path / "model.safetensors")
    stages = 4 // dp
    assert set(read) == {"shared"} | {f"{kind}{stage}" for kind in "ws" for stage in range(stages)}
    assert read["shared"].tolist() == [0.0, 0.0, 0.0]  # the first stage's
    for stage in range(stages):
        assert read[f"w{stage}"].dtype == torch.bfloat16
        assert read[f"w{stage}"].tolist() == [[float(stage)] * (stage + 1)] * 2
        assert read[f"s{stage}"].item() == stage


@pytest.mark.parametrize("room", [-1, 0, 4])
def test_rank_0_fails_without_leaving_the_others_behind(ranks: RankPool, room: int) -> None:
    errors = ranks.run(send_to_full_disk, 4, room)
    assert errors[0].startswith("OSError: no space left")
    assert all(e.startswith("CheckpointError: saving failed on rank 0: OSError: no space") for e in errors[1:])


# Tensor parallelism

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


def of_replica(dp: int, pp: int) -> tuple[Topology, Any]:
    """Returns this rank's place, two shards per stage, and the group of its replica."""
    topology = Topology(dp=dp, pp=pp, tp=2, rank=dist.get_rank())
    groups = [dist.new_group(topology.replica(replica)) for replica in range(dp)]
    return topology, groups[topology.dp_rank]


def send_parts(folder: str, dp: int, pp: int) -> int:
    """Returns how many bytes of tensors this rank has sent."""
    topology, group = of_replica(dp, pp)
    stage, shard = topology.pp_rank, topology.tp_rank
    wrong = 100.0 * topology.dp_rank
    own = {f"{name}{stage}": SPREAD[name].take(tensor + stage + wrong, shard) for name, tensor in WHOLE.items()}
    # What several shards hold, and what is the same on both: the first one's counts.
    own[f"fused{stage}"][2:] += shard
    own[f"same{stage}"] = torch.tensor([stage, shard])
    sent = 0
    isend = dist.isend

    def counting(tensor: Tensor, **named: Any) -> Any:
        nonlocal sent
        sent += tensor.numel()
        return isend(tensor, **named)

    dist.isend = counting
    try:
        stream: Stream[str] = Stream(topology, group, 30)
        with together("saving", WorldGroup(topology, 30), 30):
            spread = {f"{name}{stage}": how for name, how in SPREAD.items()}
            stream.send(own, None, WeightsSink(Path(folder)), spread)
    finally:
        dist.isend = isend
    return sent


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_parts_of_shards_become_whole(ranks: RankPool, tmp_path: Path, dp: int, pp: int) -> None:
    sent = ranks.run(send_parts, 2 * dp * pp, str(tmp_path), dp, pp)
    read = load_file(tmp_path / "model.safetensors")
    assert set(read) == {f"{name}{stage}" for name in (*WHOLE, "same") for stage in range(pp)}
    for stage in range(pp):
        assert read[f"same{stage}"].tolist() == [stage, 0]
        for name, tensor in WHOLE.items():
            assert read[f"{name}{stage}"].dtype == tensor.dtype
            assert torch.equal(read[f"{name}{stage}"], tensor + stage), name
    # 2 rows of the 3 that "fused" has there, 3 columns of bf16, 3 fp64, half of "even".
    assert sent[1] == 2 * 2 * 4 + 2 * 3 * 2 + 3 * 8 + 48
    assert all(count == 0 for count in sent[2:]) or pp == 2


def send_without_a_part() -> str:
    topology, group = of_replica(1, 1)
    own = {"even": torch.zeros(2, 2, 3)} if topology.tp_rank == 0 else {}
    stream: Stream[str] = Stream(topology, group, 30)
    try:
        with together("saving", WorldGroup(topology, 30), 30):
            stream.send(own, None, Failing(9), SPREAD)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_shard_without_its_part_is_told(ranks: RankPool) -> None:
    errors = ranks.run(send_without_a_part, 2)
    assert all("even is spread over 2 shards, but shard 1 has no values of it" in error for error in errors)


class Watching:
    """How many bytes of memory that is not on disk torch has given out at most, while tensors arrive."""

    def __init__(self) -> None:
        self.most = 0

    def open(self, entries: Mapping[str, Entry], notes: list[Any]) -> None:
        gc.collect()

    def write(self, name: str, tensor: Tensor) -> None:
        self.most = max(self.most, sum(t.untyped_storage().nbytes() for t in _tensors()))

    def close(self) -> None:
        pass


def _tensors() -> list[Tensor]:
    found = {t.untyped_storage().data_ptr(): t for t in gc.get_objects() if isinstance(t, Tensor) and t.numel() > 1000}
    return list(found.values())


def watch_memory() -> int:
    topology, group = of_replica(1, 1)
    own = {f"{n}": torch.zeros(250, 1000) for n in range(4)}
    before = sum(t.untyped_storage().nbytes() for t in _tensors())
    stream: Stream[str] = Stream(topology, group, 30)
    sink = Watching()
    stream.send(own, None, sink, dict.fromkeys(own, Shard.even(0, 500, 2)))
    return sink.most - before


def test_one_whole_tensor_at_a_time(ranks: RankPool) -> None:
    assert 0 < ranks.run(watch_memory, 2)[0] <= 500 * 1000 * 4
