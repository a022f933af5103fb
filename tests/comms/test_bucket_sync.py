"""BucketSync from Python: replicas are threads of this process (its waits release the GIL) that meet over TCP."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d import _C

Body = Callable[[int, Any], Any]


def run_replicas(size: int, body: Body, timeout: float = 30.0, slice_bytes: int = 0) -> list[Any]:
    """Returns what `body(rank, sync)` returned on each replica, or the exception it raised."""
    all_peers = [_C.RingPeers(rank, size, "127.0.0.1", "s" * 32) for rank in range(size)]

    def replica(rank: int) -> Any:
        peers = all_peers[rank]
        peers.connect(("127.0.0.1", all_peers[(rank + 1) % size].port), timeout)
        sync = _C.BucketSync(
            rank,
            size,
            _C.NicArbiter(),
            torch.device("cpu"),
            timeout,
            f"replica {rank}",
            slice_bytes=slice_bytes,
            peers=peers,
        )
        try:
            return body(rank, sync)
        except Exception as error:
            return error
        finally:
            sync.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(replica, range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
def test_early_buckets_end_as_the_mean_everywhere(size: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(size * 1001, dtype=dtype) for _ in range(size)]
    mean = sum(parts) / size

    def body(rank: int, sync: Any) -> torch.Tensor:
        gradients = parts[rank].clone()
        sync.begin(1, [0])
        sync.reduce(0, gradients, 1.0 / size)
        sync.wait_reduced(0)
        torch.testing.assert_close(gradients.chunk(size)[rank], mean.chunk(size)[rank])
        sync.wait_gathered(0)
        return gradients

    gathered = run_replicas(size, body, slice_bytes=1 << 10)
    for gradients in gathered:
        torch.testing.assert_close(gradients, mean)
        assert torch.equal(gradients, gathered[0])


def test_parameters_are_gathered_in_any_dtype() -> None:
    def body(rank: int, sync: Any) -> torch.Tensor:
        gradients = torch.ones(10)
        parameters = torch.full((10,), float(rank), dtype=torch.bfloat16)
        sync.begin(1, [])
        sync.reduce(3, gradients, 1.0)
        sync.wait_reduced(3)
        assert sync.is_gathered(3)
        sync.gather(3, parameters)
        sync.drain()
        assert [record[0] for record in sync.take_records()] == ["reduce", "gather"] and sync.is_gathered(3)
        return parameters

    for parameters in run_replicas(2, body):
        assert parameters.tolist() == [0.0] * 5 + [1.0] * 5


def test_gathers_of_a_step_run_into_the_next() -> None:
    steps, buckets = 4, 3

    def body(rank: int, sync: Any) -> list[Any]:
        flat = [torch.empty(2000) for _ in range(buckets)]
        for step in range(1, steps + 1):
            sync.begin(step, list(range(buckets)))
            for bucket in reversed(range(buckets)):
                sync.wait_gathered(bucket)
                if step > 1:
                    assert torch.all(flat[bucket] == 1 + 2 * (step - 1) + 2 * bucket)
                flat[bucket].fill_(rank + step + bucket)
                sync.reduce(bucket, flat[bucket], 1.0)
            for bucket in range(buckets):
                sync.wait_reduced(bucket)
        for bucket in range(buckets):
            sync.wait_gathered(bucket)
        return sync.take_records()

    for records in run_replicas(2, body):
        assert not isinstance(records, Exception), records
        assert len(records) == 2 * steps * buckets
        assert {lane for lane, *_ in records} == {"reduce", "gather"}
        for _, text, start, end, num_bytes in records:
            assert text in {"bucket 0", "bucket 1", "bucket 2"} and 0 < start <= end and num_bytes == 4000


def test_a_replica_that_never_reduces_is_a_timeout_that_names_it() -> None:
    finished = threading.Event()

    def body(rank: int, sync: Any) -> None:
        sync.begin(7, [])
        if rank == 1:
            assert finished.wait(30)
            return
        try:
            sync.reduce(2, torch.zeros(4), 1.0)
            sync.wait_reduced(2)
        finally:
            finished.set()

    error = run_replicas(2, body, timeout=0.5)[0]
    assert isinstance(error, _C.CommError)
    for part in ("replica 0", "bucket 2", "step 7", "0.500 s", "comm_timeout", "waits for replica 1"):
        assert part in str(error), error


def test_replicas_that_disagree_about_the_plan_are_told() -> None:
    def body(rank: int, sync: Any) -> None:
        sync.begin(1, [])
        sync.reduce(rank, torch.zeros(4), 1.0)
        sync.wait_reduced(rank)

    errors = run_replicas(2, body)
    assert all(isinstance(error, _C.CommError) for error in errors), errors
    assert any("reduce of bucket 0" in str(e) and "reduce of bucket 1" in str(e) for e in errors), errors


def test_abort_ends_waits_with_its_reason() -> None:
    def body(rank: int, sync: Any) -> None:
        sync.begin(1, [])
        sync.reduce(0, torch.zeros(4), 1.0)
        if rank == 0:
            sync.abort("enough")
        sync.wait_reduced(0)

    first, second = run_replicas(2, body)
    assert isinstance(first, _C.CommError) and str(first) == "enough"
    assert second is None or isinstance(second, _C.CommError)


def test_what_cannot_be_synchronised_is_refused() -> None:
    def body(rank: int, sync: Any) -> None:
        sync.begin(1, [])
        with pytest.raises(ValueError, match="not 2 equal shards"):
            sync.reduce(0, torch.zeros(3), 1.0)
        with pytest.raises(ValueError, match="float32 or float64"):
            sync.reduce(0, torch.zeros(4, dtype=torch.bfloat16), 1.0)
        with pytest.raises(ValueError, match="flat and contiguous"):
            sync.gather(0, torch.zeros(4, 2)[:, 0])
        with pytest.raises(ValueError, match="no conjugate or negative view"):
            sync.reduce(0, torch._neg_view(torch.zeros(4)), 1.0)
        with pytest.raises(RuntimeError, match="was not handed to reduce"):
            sync.wait_reduced(0)

    assert run_replicas(2, body) == [None, None]


def test_bandwidth_becomes_known() -> None:
    """A step tells nothing where its sender was not kept busy, as on a machine with other work."""
    both, speeds = threading.Barrier(2, timeout=30.0), [0.0, 0.0]

    def body(rank: int, sync: Any) -> int:
        assert sync.bandwidth() == 0.0
        for step in range(1, 501):
            sync.begin(step, [0])
            sync.reduce(0, torch.zeros(2_000_000), 1.0)
            sync.wait_gathered(0)
            speeds[rank] = float(sync.bandwidth())
            both.wait()
            if min(speeds) > 0.0:
                return step
            both.wait()  # nobody changes them before the other has looked
        return 0

    steps = run_replicas(2, body)
    assert steps[0] == steps[1] > 0 and all(speed > 1e6 for speed in speeds), (steps, speeds)


def _over_groups(size: int) -> None:
    reduce_group, gather_group = dist.new_group(), dist.new_group()
    rank = dist.get_rank()
    sync = _C.BucketSync(
        rank,
        size,
        _C.NicArbiter(),
        torch.device("cpu"),
        30.0,
        f"replica {rank}",
        slice_bytes=1 << 10,
        reduce_group=reduce_group.group_name,
        gather_group=gather_group.group_name,
    )
    for step in (1, 2):
        gradients = [torch.full((size * 999,), float(rank + bucket)) for bucket in range(2)]
        sync.begin(step, [1])
        for bucket in (1, 0):
            sync.reduce(bucket, gradients[bucket], 1.0 / size)
        sync.wait_reduced(0)
        assert torch.all(gradients[0].chunk(size)[rank] == (size - 1) / 2)
        sync.wait_gathered(1)
        assert torch.all(gradients[1] == (size - 1) / 2 + 1)
    sync.close()


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("size", [2, 3])
def test_rings_over_process_groups(ranks: Any, size: int) -> None:
    ranks.run(_over_groups, size, size)


def test_links_or_groups() -> None:
    with pytest.raises(ValueError, match="peers or two groups"):
        _C.BucketSync(0, 2, _C.NicArbiter(), torch.device("cpu"), 1.0, "r", slice_bytes=0)


def test_a_signal_does_not_end_a_wait_for_a_neighbour() -> None:
    peers = [_C.RingPeers(replica, 2, "127.0.0.1", "s" * 32) for replica in (0, 1)]
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    start = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="comm_timeout"):
            peers[0].connect(("127.0.0.1", peers[1].port), 1.0)  # who never calls back
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start >= 1.0
