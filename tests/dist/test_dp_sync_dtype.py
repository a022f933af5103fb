"""Gradients that travel as bfloat16: sums to the bit of a plain reference, half the bytes, one result in every way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fold3d
from fold3d.errors import ConfigError
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import assert_ranks_agree, assert_same_bits
from tests.dist.test_collectives_c10d import bucket_sync
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

SHARD, SCALE = 1000, 0.3
ROUNDED = replace(
    Case(dp=2, pp=2, segments=2, m=3, schedule="aiao", dtype="float32", dropout=0.1), dp_sync_dtype="bfloat16"
)


def gradients_of(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size * SHARD, generator=generator)


def rounded(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def ring_sum(shards: list[Tensor], owner: int) -> Tensor:
    """Returns the sum of everybody's shard, from the replica after the owner round the ring."""
    size = len(shards)
    total = shards[(owner + 1) % size]
    for hop in range(2, size + 1):
        total = shards[(owner + hop) % size] + rounded(total)
    return rounded(total * SCALE)


def sum_up(library: bool) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
    """Returns the gathered sums, weights that are gathered whole, others that are gathered rounded, and the records."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with bucket_sync(library=library) as (sync, _):
        sync.begin(1, [])
        flat, weights, values = (gradients_of(rank, size) for _ in range(3))
        sync.reduce(0, flat, SCALE, True)
        sync.wait_reduced(0)
        sync.gather(0, flat, True)
        sync.gather(1, weights)
        sync.gather(2, values, True)
        for bucket in range(3):
            sync.wait_gathered(bucket)
        return flat, weights, values, sync.take_records()


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_those_of_a_plain_reference(ranks: RankPool, size: int) -> None:
    shards = [gradients_of(rank, size).chunk(size) for rank in range(size)]
    wanted = torch.cat([ring_sum([shards[rank][owner] for rank in range(size)], owner) for owner in range(size)])
    whole = torch.cat([shards[owner][owner] for owner in range(size)])
    for rank, (sums, weights, values, records) in enumerate(ranks.run(sum_up, size, False)):
        assert torch.equal(sums, wanted)
        assert torch.equal(weights, whole), "what is not asked to be rounded travels whole"
        own = slice(rank * SHARD, (rank + 1) * SHARD)
        expected = rounded(whole)
        expected[own] = whole[own]  # its owner keeps what it has
        assert torch.equal(values, expected)
        sent = {(lane, text): size_of for lane, text, *_, size_of in records}
        half, full = 2 * SHARD * (size - 1), 4 * SHARD * (size - 1)
        assert sent == {
            ("reduce", "bucket 0"): half,
            ("gather", "bucket 0"): half,
            ("gather", "bucket 1"): full,
            ("gather", "bucket 2"): half,
        }


@pytest.mark.parametrize("size", [2, 3])
def test_the_librarys_sums_are_rounded_too(ranks: RankPool, size: int) -> None:
    """In its own order: of two replicas within the roundings of both, and the same bits on all."""
    exact = sum(gradients_of(rank, size).double() for rank in range(size)) * SCALE
    found = ranks.run(sum_up, size, True)
    for sums, weights, _, records in found:
        assert torch.equal(sums, found[0][0]) and torch.equal(sums, rounded(sums))
        torch.testing.assert_close(sums.double(), exact, rtol=size * 2**-8, atol=size * 2**-7)
        assert torch.equal(weights, found[0][1])
        assert {size_of for lane, *_, size_of in records if lane == "reduce"} == {2 * SHARD * (size - 1)}


@pytest.mark.parametrize("changes", [{}, {"tied": False, "transport": "c10d"}, {"dp": 3, "pp": 1}], ids=str)
def test_every_way_gives_the_same_bits(ranks: RankPool, changes: dict[str, Any]) -> None:
    """And gradients are those of float32 up to their roundings, accumulated over micro-batches before."""
    case = replace(ROUNDED, **changes)
    found = {
        way: ranks.run(parity_jobs.train, case.ranks, replace(case, dp_sync=way))
        for way in ("early", "zero1", "serial")
    }
    for results in found.values():
        assert_ranks_agree(results, case)
        assert_same_bits(results[0], found["early"][0])
    exact = ranks.run(parity_jobs.train, case.ranks, replace(case, dp_sync_dtype="float32"))[0]
    ours = found["early"][0]
    assert ours.losses[0] == exact.losses[0] and ours.norms != exact.norms
    assert ours.norms == pytest.approx(exact.norms, rel=2**-8)
    assert ours.losses == pytest.approx(exact.losses, rel=1e-3)


def build(dtype: torch.dtype) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(dtype)
    config = fold3d.ParallelConfig(dp=2, segments=1, dp_sync_dtype="bfloat16")
    with pytest.raises(Exception) as caught:
        fold3d.Engine(model, config, optimizer=torch.optim.AdamW).step({"input": torch.ones(2, 3, dtype=dtype)})
    return f"{type(caught.value).__name__}: {caught.value}"


def test_wider_gradients_are_refused(ranks: RankPool) -> None:
    for text in ranks.run(build, 2, torch.float64):
        assert 'dp_sync_dtype="bfloat16"' in text and "float64" in text


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="dp_sync_dtype='half': must be one of float32, bfloat16"):
        fold3d.ParallelConfig(dp_sync_dtype="half")
    with pytest.raises(ConfigError, match="dp_sync_dtype='bfloat16' has no effect with one replica"):
        fold3d.ParallelConfig(dp_sync_dtype="bfloat16").resolve_dp(1)
