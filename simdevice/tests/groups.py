"""What two ranks with the simulated device do over simccl, its process groups."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fold3d import _C
from simdevice import sim

DEVICE = "sim"
SHORT = timedelta(seconds=2)
"""The time limit of groups that hang on purpose."""


def _group(timeout: timedelta = timedelta(seconds=30), *, bound: bool = False) -> dist.ProcessGroup:
    group = dist.new_group(backend="simccl", timeout=timeout, device_id=torch.device("sim:0") if bound else None)
    assert isinstance(group, dist.ProcessGroup)
    return group


def collectives() -> None:
    """Their numbers."""
    group, rank = _group(), dist.get_rank()
    x = torch.full((6,), float(rank + 1), device=DEVICE)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 6
    y = torch.empty(12, device=DEVICE)
    dist.all_gather_into_tensor(y, x + rank, group=group)
    assert y.tolist() == [3.0] * 6 + [4.0] * 6
    z = torch.empty(6, device=DEVICE)
    dist.reduce_scatter_tensor(z, y, group=group)
    assert z.tolist() == [6.0 + 2 * rank] * 6
    parts = [torch.empty(6, device=DEVICE) for _ in range(2)]
    dist.all_gather(parts, z, group=group)
    assert [part[0].item() for part in parts] == [6.0, 8.0]
    dist.broadcast(z, 1, group=group)
    assert z.tolist() == [8.0] * 6
    w = torch.empty(6, device=DEVICE)
    dist.all_to_all_single(w, torch.arange(6.0, device=DEVICE) + 10 * rank, group=group)
    first = 3.0 * rank
    assert w.tolist() == [first, first + 1, first + 2, first + 10, first + 11, first + 12]
    before = w.clone()
    dist.reduce(w, 0, group=group)
    sums = [0.0 + 3, 1.0 + 4, 2.0 + 5, 10.0 + 13, 11.0 + 14, 12.0 + 15]
    assert w.tolist() == (sums if rank == 0 else before.tolist()), "who is not the root only reads"
    dist.barrier(group=group)


def order() -> list[str]:
    """The host goes on at once; what a wait orders is there, what none orders is a race; returns the reports."""
    group, rank = _group(), dist.get_rank()
    dist.barrier(group=group)
    x = torch.full((1000,), float(rank + 1), device=DEVICE)
    x + 1  # the first of its sizes: torch imports its meta kernels, which takes seconds
    sim.sleep(300)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    y = x + 1
    assert not work.is_completed()
    assert y.sum().item() == 4000
    with sim.recorded() as reports:
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        y = x + 1
        work.wait()
    with sim.recorded() as others:
        sent = dist.isend(x, 1 - rank, group=group) if rank == 0 else dist.irecv(x, 1 - rank, group=group)
        assert sent is not None
        x.zero_()
        sent.wait()
    return reports + others


def messages() -> None:
    """Both directions, batches, and many at once; a message waits for its receiver, not the receiver for the host."""
    group, rank = _group(), dist.get_rank()
    x, y = torch.arange(8.0, device=DEVICE), torch.empty(8, device=DEVICE)
    if rank == 0:
        dist.send(x, 1, group=group)
        dist.recv(y, 1, group=group)
        assert torch.equal(y.cpu(), 10 * torch.arange(8.0))
    else:
        dist.recv(y, 0, group=group)
        dist.send(y * 10, 0, group=group)
    sent, got = torch.full((5,), float(rank), device=DEVICE), torch.empty(5, device=DEVICE)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank, group), dist.P2POp(dist.irecv, got, 1 - rank, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == [1.0 - rank] * 5
    values = [torch.full((3,), float(i), device=DEVICE) for i in range(20)]
    works = [(dist.isend if rank == 0 else dist.irecv)(value.mul_(1 - rank), 1 - rank, group) for value in values]
    for work in works:
        assert work is not None
        work.wait()
    assert [value[0].item() for value in values] == [float(i) for i in range(20)]


def opposite_orders() -> str:
    """Two sends that meet, each before its receive, hang as with NCCL; returns what the host is told."""
    group, peer = _group(SHORT), 1 - dist.get_rank()
    x, y = torch.ones(4, device=DEVICE), torch.empty(4, device=DEVICE)
    works = [dist.isend(x, peer, group=group), dist.irecv(y, peer, group=group)]
    assert all(works)
    with pytest.raises(RuntimeError) as error:
        torch.accelerator.synchronize()
    _finish()
    return str(error.value)


def beside_a_collective(bound: bool) -> str:
    """A message launched before a collective on one rank and after it on the other; returns what the host is told.

    They have communicators of their own, unless a device is bound to the group.
    """
    group, rank = _group(SHORT, bound=bound), dist.get_rank()
    x, y = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    works = [dist.all_reduce(x, group=group, async_op=True)] if rank == 0 else []
    works.append(dist.isend(y, 1, group=group) if rank == 0 else dist.irecv(y, 0, group=group))
    if rank == 1:
        works.append(dist.all_reduce(x, group=group, async_op=True))
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        _finish()
        return str(error)
    return ""


def aborted() -> float:
    """A collective that the other rank never joins is aborted; returns seconds until the device had ended it."""
    group = _group()
    if dist.get_rank() == 1:
        return 0.0
    work = dist.all_reduce(torch.ones(4, device=DEVICE), group=group, async_op=True)
    assert work is not None
    begin = time.perf_counter()
    group._get_backend(torch.device(DEVICE)).abort()
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def data_parallel() -> None:
    """torch's DistributedDataParallel has the gradients of one process, without a race."""
    group, rank = _group(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).double()
    batches = [torch.randn(16, 32, dtype=torch.float64) for _ in range(2)]
    replica = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).double().to(DEVICE), process_group=group
    )
    replica.module.load_state_dict(model.state_dict())
    replica(batches[rank].to(DEVICE)).square().mean().backward()
    sum(model(batch).square().mean() / 2 for batch in batches).backward()  # type: ignore[union-attr]
    for want, got in zip(model.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=1e-12, atol=1e-14)


def sums_in_vain() -> tuple[int, str]:
    """Sums of a bucket that the other rank does not join, on rank 0. Returns how often the host has waited until a
    stream waits for them, and what it is told by whoever looks for their end."""
    reduces, gathers = (_group(timedelta(seconds=60)).group_name for _ in range(2))
    device = torch.device("sim", torch.accelerator.current_device_index())
    sync = _C.BucketSync(
        *(dist.get_rank(), 2, _C.NicArbiter(), device, 1.0, "here"),
        slice_bytes=0,
        reduce_group=reduces,
        gather_group=gathers,
    )
    waits, told = 0, ""
    if dist.get_rank() == 0:
        gradients = torch.ones(8, device=device)
        sync.begin(1, [])
        before = sim.host_waits()
        sync.reduce(0, gradients, 0.5)
        sync.wait_reduced(0)
        gradients += 1  # ordered behind the sums, else a race
        waits = sim.host_waits() - before
        with pytest.raises(_C.CommError) as late:
            sync.drain()
        told = str(late.value)
        torch.accelerator.synchronize()  # what nobody joins was aborted
    sync.close()
    dist.barrier()
    return waits, told


def _finish() -> None:
    """Lets what else hangs come to its time limit, too."""
    for _ in range(8):
        try:
            torch.accelerator.synchronize()
            return
        except RuntimeError:
            continue
