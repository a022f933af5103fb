"""Tensors of every stage reach rank 0; what fails there fails everywhere and leaves nobody waiting."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fold3d.checkpoint import Stream, WeightsSink, together
from fold3d.checkpoint.arrivals import Entry
from fold3d.comms import tree_group
from fold3d.comms.family import Family
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


@contextlib.contextmanager
def replica(dp: int, tp: int = 1) -> Iterator[WorldGroup]:
    """All ranks, in as many stages as they fill."""
    world = WorldGroup(Topology(dp=dp, pp=dist.get_world_size() // (dp * tp), tp=tp, rank=dist.get_rank()), 30)
    try:
        yield world
        world.barrier()
    finally:
        world.close()


def own(topology: Topology) -> dict[str, Tensor]:
    stage = topology.pp_rank
    return {
        f"w{stage}": torch.full((2, stage + 1), float(stage + 10 * topology.dp_rank)).bfloat16(),
        f"s{stage}": torch.tensor(stage),
        "shared": torch.full((3,), float(stage)),
    }


def send_weights(folder: str, dp: int) -> None:
    with replica(dp) as world, together("saving", world, 30):
        Stream[str](world, 30).send(own(world.topology), None, WeightsSink(Path(folder)))


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
    with replica(dp=2) as world:
        try:
            with together("saving", world, 30):
                Stream[str](world, 30).send(own(world.topology), None, Failing(room))
        except (OSError, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def send_unreadable(folder: str) -> str:
    with replica(dp=1) as world:
        tensors = own(world.topology)
        unreadable = mock.patch("fold3d.checkpoint.stream.as_bytes", side_effect=RuntimeError("no memory"))
        try:
            with together("saving", world, 30), unreadable if world.topology.pp_rank == 2 else contextlib.nullcontext():
                Stream[str](world, 30).send(tensors, None, WeightsSink(Path(folder)))
        except (RuntimeError, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_stage_that_cannot_read_its_tensors(ranks: RankPool, tmp_path: Path) -> None:
    reason = "rank 2 could not send its tensors: RuntimeError: no memory"
    elsewhere = f"CheckpointError: saving failed on rank 0: CheckpointError: {reason}"
    errors = ranks.run(send_unreadable, 4, str(tmp_path))
    assert errors == [f"CheckpointError: {reason}", elsewhere, "RuntimeError: no memory", elsewhere]


@pytest.mark.gate(cases=1)
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


@pytest.mark.gate(cases=1)
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


def send_parts(folder: str, dp: int) -> int:
    """Returns how many bytes of tensors this rank has sent, its own and those of others."""
    sent = 0

    class Counting(Family):
        def send(self, data: Tensor, timeout: float) -> Callable[[], None]:
            nonlocal sent
            sent += data.numel()
            return super().send(data, timeout)

    with mock.patch.object(tree_group, "Family", Counting), replica(dp, tp=2) as world:
        stage, shard = world.topology.pp_rank, world.topology.tp_rank
        wrong = 100.0 * world.topology.dp_rank
        own = {f"{name}{stage}": SPREAD[name].take(tensor + stage + wrong, shard) for name, tensor in WHOLE.items()}
        # What several shards hold, and what is the same on both: the first one's counts.
        own[f"fused{stage}"][2:] += shard
        own[f"same{stage}"] = torch.tensor([stage, shard])
        with together("saving", world, 30):
            spread = {f"{name}{stage}": how for name, how in SPREAD.items()}
            Stream[str](world, 30).send(own, None, WeightsSink(Path(folder)), spread)
    return sent


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_parts_of_shards_become_whole(ranks: RankPool, tmp_path: Path, dp: int, pp: int) -> None:
    sent = ranks.run(send_parts, 2 * dp * pp, str(tmp_path), dp)
    read = load_file(tmp_path / "model.safetensors")
    assert set(read) == {f"{name}{stage}" for name in (*WHOLE, "same") for stage in range(pp)}
    for stage in range(pp):
        assert read[f"same{stage}"].tolist() == [stage, 0]
        for name, tensor in WHOLE.items():
            assert read[f"{name}{stage}"].dtype == tensor.dtype
            assert torch.equal(read[f"{name}{stage}"], tensor + stage), name
    # 2 rows of the 3 that "fused" has there, 3 columns of bf16, 3 fp64, half of "even".
    of_second = 2 * 2 * 4 + 2 * 3 * 2 + 3 * 8 + 48
    if pp == 1:
        assert sent == [0, of_second, 0, 0][: 2 * dp]
    else:  # what the second shard of stage 1 has goes by that of stage 0
        assert sent[0] == 0 and sent[3] == of_second and sent[1] == 2 * of_second


def send_without_a_part() -> str:
    with replica(1, tp=2) as world:
        own = {"even": torch.zeros(2, 2, 3)} if world.topology.tp_rank == 0 else {}
        try:
            with together("saving", world, 30):
                Stream[str](world, 30).send(own, None, Failing(9), SPREAD)
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
    with replica(1, tp=2) as world:
        own = {f"{n}": torch.zeros(250, 1000) for n in range(4)}
        before = sum(t.untyped_storage().nbytes() for t in _tensors())
        sink = Watching()
        Stream[str](world, 30).send(own, None, sink, dict.fromkeys(own, Shard.even(0, 500, 2)))
        return sink.most - before


def test_one_whole_tensor_at_a_time(ranks: RankPool) -> None:
    assert 0 < ranks.run(watch_memory, 2)[0] <= 500 * 1000 * 4
