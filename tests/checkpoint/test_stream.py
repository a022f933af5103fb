"""Tensors of every stage reach rank 0; what fails there fails everywhere and leaves nobody waiting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fold3d.checkpoint import Stream, WeightsSink, together
from fold3d.checkpoint.stream import Entry
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError
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
