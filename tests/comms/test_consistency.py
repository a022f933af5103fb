"""Stages of a replica notice that they were given different batches, wherever the batches lie."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.comms import consistency
from fold3d.comms.consistency import compare, fingerprint
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import ConfigError
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


def batches() -> list[dict[str, Tensor]]:
    ids = torch.arange(24).reshape(2, 12)
    return [{"input_ids": ids + k, "mask": ids > 3, "pixels": ids / 7} for k in range(2)]


@pytest.mark.parametrize("on_device", [False, True])
def test_any_difference_shows(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """A CPU tensor stands in for one on a device, whose values are hashed there."""
    waited: list[int] = []
    if on_device:
        monkeypatch.setattr(consistency, "_is_in_host_memory", lambda _: False)
        hashed = consistency.hashed
        monkeypatch.setattr(consistency, "hashed", lambda samples: waited.append(1) or hashed(samples))
    same = fingerprint(batches())
    assert same == fingerprint(batches()) and 0 <= same < 2**32
    found = {same}
    for number in range(2):
        for name in ("input_ids", "mask", "pixels"):
            for place in ((0, 0), (1, 11)):
                changed = batches()
                value = changed[number][name]
                value[place] = ~value[place] if value.dtype == torch.bool else value[place] + 1
                found.add(fingerprint(changed))
    found |= {fingerprint(batches()[::-1]), fingerprint(batches()[:1])}
    assert len(found) == 15
    assert len(waited) == (16 if on_device else 0), "one number for each step"


def test_swapped_values_and_samples_show() -> None:
    one, other = torch.tensor([1, 2, 3, 3], dtype=torch.uint8), torch.tensor([2, 1, 3, 3], dtype=torch.uint8)
    codes = {int(consistency.hashed(samples)) for samples in ([one, other], [other, one], [one], [other], [one, one])}
    assert len(codes) == 5


def compared(of_all: list[dict[str, str]], of_place: list[dict[str, str]]) -> str:
    """Returns the hash, or why ranks differ, of two replicas of two stages."""
    rank = dist.get_rank()
    world = WorldGroup(Topology(dp=2, pp=2, rank=rank), 30.0)
    try:
        return compare(world, of_all[rank], of_place[rank])
    except ConfigError as error:
        return str(error)
    finally:
        world.close()


@pytest.mark.dist
@pytest.mark.gate
def test_what_differs_is_named_with_ranks_and_values(ranks: RankPool) -> None:
    """The values are shown from where they differ on; what belongs to a place is compared with replica 0's."""
    same = {"seed": "1", "parameter a": "(3,)"}
    places = [{"bucket 0": "a"}, {"bucket 0": "b"}] * 2
    assert len({*ranks.run(compared, 4, [same] * 4, places)}) == 1

    long = "x" * 1000
    other_seeds = [same, same | {"seed": "2"}, same, same | {"seed": "3"}]
    without = [same, same, {"seed": "1"}, same]
    cases = [
        (other_seeds, places, "ranks [1, 3] have another seed than rank 0: 2 on rank 1, 3 on rank 3, and 1 there"),
        (without, places, "ranks [2] have another parameter a than rank 0: nothing on rank 2"),
        ([{"names": f"{long}{one}"} for one in "aaba"], places, "xb on rank 2, and x"),
        (
            [same] * 4,
            [*places[:3], {"bucket 0": "c"}],
            "ranks [3] have another bucket 0 than rank 1: c on rank 3, and b",
        ),
    ]
    for of_all, of_place, text in cases:
        for found in ranks.run(compared, 4, of_all, of_place):
            assert text in found and "same script" in found and len(found) < 1000, found
