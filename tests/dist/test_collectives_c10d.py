"""DP.sync by the library's own collectives, as CUDA has it with NCCL; here in host memory, with gloo."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fold3d import _C
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_ranks_agree, assert_same_bits
from tests.helpers.ranks import RankPool

CHUNK_BYTES = 512
SHARDS = (1, 37, 128, 999)
"""Elements of a shard of each bucket: less than a chunk, whole chunks, many with a shorter one behind them."""
WEIGHTS, EARLY = len(SHARDS), (3, 0)
"""The bucket of weights that is only gathered; the buckets whose sums are gathered without being asked for."""
SCALE = 0.3
"""No power of two: where it is rounded shows."""


@contextlib.contextmanager
def bucket_sync(*, library: bool = True, timeout: float = 30.0, limit: float = 60.0) -> Iterator[tuple[Any, Any]]:
    """A BucketSync over two groups of all ranks, and the first group; what nobody joins ends after `limit` seconds."""
    groups = [dist.new_group(timeout=timedelta(seconds=limit)) for _ in range(2)]
    sync = _C.BucketSync(
        dist.get_rank(),
        dist.get_world_size(),
        _C.NicArbiter(),
        torch.device("cpu"),
        timeout,
        f"replica {dist.get_rank()}",
        slice_bytes=CHUNK_BYTES,
        reduce_group=groups[0].group_name,
        gather_group=groups[1].group_name,
        library=library,
    )
    try:
        yield sync, groups[0]
    finally:
        sync.close()


def gradients_of(rank: int, size: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size * shard, dtype=dtype, generator=generator) for shard in SHARDS]


# Numbers and order


def steps_of_sync(dtype: torch.dtype, library: bool) -> tuple[list[list[torch.Tensor]], list[Any]]:
    """Returns the buckets after each of two steps, and the records; bucket 2 is not gathered: this replica's shard."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    with bucket_sync(library=library) as (sync, _):
        for step in (1, 2):
            flat = gradients_of(rank, size, step, dtype)
            weights = torch.full((size * 77,), float(rank), dtype=torch.bfloat16)
            sync.begin(step, list(EARLY))
            for bucket in reversed(range(len(SHARDS))):
                sync.reduce(bucket, flat[bucket], SCALE)
            sync.wait_reduced(1)
            sync.gather(1, flat[1])
            sync.gather(WEIGHTS, weights)
            sync.wait_reduced(2)
            for bucket in (*EARLY, 1, WEIGHTS):
                sync.wait_gathered(bucket)
            seen.append([flat[0], flat[1], flat[3], flat[2].chunk(size)[rank], weights])
        return seen, sync.take_records()


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers(ranks: RankPool, size: int, dtype: torch.dtype) -> None:
    """Those of a ring and of torch; with two replicas there is one order of a sum, so to the bit."""
    same = functools.partial(torch.testing.assert_close, rtol=0, atol=0) if size == 2 else torch.testing.assert_close
    found = ranks.run(steps_of_sync, size, dtype, True)
    ring = ranks.run(steps_of_sync, size, dtype, False)
    for index, step in enumerate((1, 2)):
        replicas = [gradients_of(rank, size, step, dtype) for rank in range(size)]
        wanted = [sum(parts) * SCALE for parts in zip(*replicas, strict=True)]
        for rank in range(size):
            *sums, shard, weights = found[rank][0][index]
            assert weights.tolist() == [float(owner) for owner in range(size) for _ in range(77)]
            for ours, theirs in zip([*sums, shard], [*wanted[:2], wanted[3], wanted[2].chunk(size)[rank]], strict=True):
                same(ours, theirs)
            for ours, theirs in zip([*sums, shard], ring[rank][0][index][:-1], strict=True):
                same(ours, theirs)
            for ours, first in zip(sums, found[0][0][index][:3], strict=True):
                assert torch.equal(ours, first), "replicas have the same bits"


@pytest.mark.gate
def test_order_and_records(ranks: RankPool) -> None:
    """One order on all replicas: sums as handed over; early gathers as planned, then the others."""
    for _, records in ranks.run(steps_of_sync, 3, torch.float32, True):
        for lane, order in (("reduce", (3, 2, 1, 0)), ("gather", (*EARLY, 1, WEIGHTS))):
            own = [record for record in records if record[0] == lane]
            assert [text for _, text, *_ in own] == 2 * [f"bucket {bucket}" for bucket in order]
            sizes = [77 * 2 if bucket == WEIGHTS else SHARDS[bucket] * 4 for bucket in order]
            assert [num_bytes for *_, num_bytes in own] == 2 * [2 * size for size in sizes]
            assert all(start <= end for _, _, start, end, _ in own)
            assert all(before[3] <= after[2] for before, after in itertools.pairwise(own)), "one after the other"


# A replica that does not come


def wait_in_vain(lane: str, timeout: float, limit: float) -> tuple[str, float, float]:
    """Returns how rank 0's wait for a collective that the others do not join ends, and when; and when it has closed."""
    text, waited = "", 0.0
    with bucket_sync(timeout=timeout, limit=limit) as (sync, _):
        sync.begin(7, [])
        start = time.monotonic()
        if dist.get_rank() == 0:
            getattr(sync, lane)(2, torch.zeros(4), *([1.0] if lane == "reduce" else []))
            with pytest.raises(_C.CommError) as caught:
                (sync.wait_reduced if lane == "reduce" else sync.wait_gathered)(2)
            text, waited = str(caught.value), time.monotonic() - start
    closed = time.monotonic() - start
    dist.barrier()
    return text, waited, closed


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("lane", ["reduce", "gather"])
def test_a_wait_ends_in_time_and_says_for_what(ranks: RankPool, lane: str) -> None:
    text, waited, closed = ranks.run(wait_in_vain, 2, lane, 0.3, 1.5)[0]
    for part in ("replica 0: ", "0.300 s", "comm_timeout"):
        assert part in text, text
    assert text.endswith(f"the {lane} of bucket 2 (step 7) waits for replica 1 of the stage")
    assert waited < closed < 10.0  # closing waits for gloo's own limit


def test_the_library_gives_up_first(ranks: RankPool) -> None:
    text, waited, closed = ranks.run(wait_in_vain, 2, "reduce", 30.0, 0.5)[0]
    assert text.startswith("replica 0: reduce of bucket 2 (step 7) failed: ")
    assert re.search("timed out waiting 500ms|timeout caused pair closure", text, re.IGNORECASE), text
    assert waited <= closed < 10.0


def abort_under_way() -> tuple[str, int]:
    """Returns rank 0's error and how many collectives it has completed when it aborts the last chunk of one."""
    chunks, found = (CHUNK_BYTES // 4, 10), ("", 0)

    def take_part(group: Any, length: int) -> None:
        with contextlib.suppress(RuntimeError):  # on a busy machine rank 0 may have aborted before the last chunk
            works = [dist.reduce(torch.ones(length), root, group=group, async_op=True) for root in range(2)]
            for work in works:
                work.wait()

    with bucket_sync(limit=2.0) as (sync, group):
        if dist.get_rank() == 1:
            take_part(group, chunks[0])
        else:
            sync.begin(1, [0])
            sync.reduce(0, torch.ones(2 * sum(chunks)), 1.0)
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.1)  # the last chunk is under way
            sync.abort("enough")
        dist.barrier()
        if dist.get_rank() == 1:
            take_part(group, chunks[1])
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.2)
            with pytest.raises(_C.CommError) as caught:
                sync.wait_reduced(0)
            found = str(caught.value), len(sync.take_records())
    return found


def test_nothing_completes_after_an_abort(ranks: RankPool) -> None:
    """The library ends what is aborted as if it were complete; its sums must not be taken for sums."""
    assert ranks.run(abort_under_way, 2)[0] == ("enough", 0)


# What is refused


def refused() -> tuple[str, str]:
    group = dist.new_group().group_name
    make = functools.partial(_C.BucketSync, library=True, slice_bytes=0)
    rank, arbiter, device = dist.get_rank(), _C.NicArbiter(), torch.device("cpu")
    with pytest.raises(ValueError) as wrong_rank:
        make(1 - rank, 2, arbiter, device, 1.0, "r", reduce_group=group, gather_group=group)
    with pytest.raises(ValueError) as with_links:
        make(rank, 2, arbiter, device, 1.0, "r", peers=_C.RingPeers(rank, 2, "127.0.0.1", "s" * 32))
    return str(wrong_rank.value), str(with_links.value)


def test_refused(ranks: RankPool) -> None:
    wrong_rank, with_links = ranks.run(refused, 2)[0]
    assert wrong_rank == "replica 1 of 2 is rank 0 of 2 in the group of its stage"
    assert "peers are for rings in host memory only" in with_links


# Whole training


def train(case: Case, library: bool) -> parity_jobs.Result:
    bucket_sync = _C.BucketSync

    def make(*args: Any, **named: Any) -> Any:
        return bucket_sync(*args, **(named | {"slice_bytes": CHUNK_BYTES, "library": library}))

    with mock.patch.object(_C, "BucketSync", make):
        return parity_jobs.train(case)


@pytest.mark.parametrize("dp_sync", ["early", "zero1", "serial"])
def test_training_has_the_bits_of_rings(ranks: RankPool, dp_sync: str) -> None:
    case = Case(dp=2, pp=2, segments=2, m=3, schedule="aiao", transport="c10d", dtype="float32", dp_sync=dp_sync)
    ours, rings = (ranks.run(train, 4, case, library) for library in (True, False))
    assert_ranks_agree(ours, case)
    assert_same_bits(ours[0], rings[0])


def test_training_with_three_replicas(ranks: RankPool) -> None:
    case = Case(dp=3, m=2, transport="c10d")
    alone = ranks.run(parity_jobs.train, 1, case.alone())[0]
    early, zero1 = (ranks.run(train, 3, replace(case, dp_sync=dp_sync), True) for dp_sync in ("early", "zero1"))
    assert_equal(early[0], alone, TOLERANCE[case.dtype])
    assert_ranks_agree(early, case)
    assert_same_bits(zero1[0], early[0])
