"""TensorParallelGroup: what Megatron's f and g, and the operations of sequence parallelism, give and pass back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fold3d import _C
from fold3d.comms.connections import connect_shards
from fold3d.comms.groups import Groups
from fold3d.sharding.shard import Shard
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.region import COPY, REDUCE, Exchange, RegionOps
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


def mine(rank: int, *shape: int) -> Tensor:
    """A tensor of small integers, different on every rank: their sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, shape, generator=generator).double()


def everybodys(size: int, *shape: int) -> list[Tensor]:
    return [mine(rank, *shape) for rank in range(size)]


@contextlib.contextmanager
def all_of(over_tcp: bool) -> Iterator[tuple[_C.TensorSync, TensorParallelGroup]]:
    """The ranks of the job as one tensor-parallel group, and this rank's part in its TP.sync."""
    topology = Topology(dp=1, pp=1, rank=dist.get_rank(), tp=dist.get_world_size())
    groups = Groups(topology, torch.device("cpu"), 60, ())
    sync = connect_shards(topology, groups, _C.NicArbiter(), 60, over_tcp=over_tcp)
    group: RegionOps = TensorParallelGroup(sync)
    assert isinstance(group, TensorParallelGroup)
    try:
        yield sync, group
    finally:
        sync.close()
        groups.close()


def on_all(over_tcp: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(group, *args)` on a rank."""
    with all_of(over_tcp) as (_, group):
        return function(group, *args)


def gathered(group: TensorParallelGroup, x: Tensor, dim: int, length: int | None = None) -> Tensor:
    """Everybody's `x`, as long as this one, unless the length of all is given; its gradient is everybody's sum."""
    return group.exchange(x, Exchange.gather(dim, length or x.shape[dim] * group.size, sums=True))


def scattered(group: TensorParallelGroup, x: Tensor, dim: int) -> Tensor:
    """This rank's part of what all have."""
    return group.exchange(x, Exchange.scatter(dim, x.shape[dim]))


def reduced(group: TensorParallelGroup, x: Tensor, dim: int) -> Tensor:
    """This rank's part of everybody's sum."""
    return group.exchange(x, Exchange.reduce_scatter(dim, x.shape[dim]))


def summed(group: TensorParallelGroup, x: Tensor, op: str = "sum") -> Tensor:
    """The sum of everybody's `x`, or the elementwise maximum, without a gradient."""
    total: Tensor = torch.ops.fold3d.tp_all_reduce(x.detach(), group.name, op)
    return total


TRANSPORTS = pytest.mark.parametrize("over_tcp", [True, False], ids=["tcp", "c10d"])


def split_mlp(group: TensorParallelGroup) -> tuple[Tensor, ...]:
    """Two linear layers, split by Megatron's way, against both whole: outputs and gradients."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    up = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    down = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    part_up = scattered(group, up.detach(), 1).requires_grad_()
    part_down = scattered(group, down.detach(), 0).requires_grad_()
    y = group.exchange((group.exchange(x, COPY) @ part_up).tanh() @ part_down, REDUCE)
    y.pow(2).sum().backward()
    got = (y.detach(), x.grad, part_up.grad, part_down.grad)
    x.grad = None
    whole = (x @ up).tanh() @ down
    whole.pow(2).sum().backward()
    assert up.grad is not None and down.grad is not None
    wanted = (whole.detach(), x.grad, scattered(group, up.grad, 1), scattered(group, down.grad, 0))
    return tuple((a - b).abs().max() for a, b in zip(got, wanted, strict=True) if a is not None and b is not None)


@pytest.mark.gate(cases=1)
@TRANSPORTS
@pytest.mark.parametrize("size", [2, 4])
def test_a_split_mlp_is_the_whole_one(ranks: RankPool, size: int, over_tcp: bool) -> None:
    for errors in ranks.run(on_all, size, over_tcp, split_mlp):
        assert len(errors) == 4 and max(errors) < 1e-12


def summed_at(group: TensorParallelGroup, dim: int, in_turns: bool) -> tuple[Tensor, Tensor]:
    x, how = mine(9, 4, 3).requires_grad_(), Exchange.copy(dim, torch.tensor([0, 2]))
    y = group.turns.run([lambda: group.exchange(x, how)], [], [])[0] if in_turns else group.exchange(x, how)
    (y * mine(group.rank, 4, 3)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@TRANSPORTS
@pytest.mark.parametrize("dim, in_turns", [(-1, False), (0, True), (1, False)])
def test_only_the_gradient_at_the_indices_is_summed(ranks: RankPool, dim: int, in_turns: bool, over_tcp: bool) -> None:
    total = sum(everybodys(2, 4, 3))
    for rank, (y, gradient) in enumerate(ranks.run(on_all, 2, over_tcp, summed_at, dim, in_turns)):
        assert torch.equal(y, mine(9, 4, 3))
        wanted = mine(rank, 4, 3)
        wanted.index_copy_(dim, torch.tensor([0, 2]), total.index_select(dim, torch.tensor([0, 2])))
        assert torch.equal(gradient, wanted)


def sequence(group: TensorParallelGroup, dim: int) -> tuple[Tensor, ...]:
    size, rank = group.size, group.rank
    x = mine(rank, 2, 4, 4).requires_grad_()
    seed = [2, 4, 4]
    seed[dim] *= size
    whole = gathered(group, x, dim)
    (whole * mine(10 + rank, *seed)).sum().backward()
    y = mine(rank, *seed).requires_grad_()
    part = reduced(group, y, dim)
    (part * mine(20 + rank, 2, 4, 4)).sum().backward()
    z = mine(30, *seed).requires_grad_()
    own = scattered(group, z, dim)
    (own * mine(20 + rank, 2, 4, 4)).sum().backward()
    assert x.grad is not None and y.grad is not None and z.grad is not None
    return whole.detach(), x.grad, part.detach(), y.grad, own.detach(), z.grad


@pytest.mark.gate(cases=2)
@TRANSPORTS
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [2, 3])
def test_sequence_regions(ranks: RankPool, size: int, dim: int, over_tcp: bool) -> None:
    whole = [2, 4, 4]
    whole[dim] *= size
    everything = torch.cat(everybodys(size, 2, 4, 4), dim)
    of_gather = torch.stack([mine(10 + rank, *whole) for rank in range(size)]).sum(0).chunk(size, dim)
    sums = torch.stack(everybodys(size, *whole)).sum(0).chunk(size, dim)
    of_parts = torch.cat([mine(20 + rank, 2, 4, 4) for rank in range(size)], dim)
    for rank, got in enumerate(ranks.run(on_all, size, over_tcp, sequence, dim)):
        own = mine(30, *whole).chunk(size, dim)[rank]
        for found, wanted in zip(got, (everything, of_gather[rank], sums[rank], of_parts, own, of_parts), strict=True):
            assert torch.equal(found, wanted)


def uneven(group: TensorParallelGroup, length: int) -> tuple[Tensor, ...]:
    whole = mine(7, 3, length, 2).requires_grad_()
    part = scattered(group, whole, 1)
    back = gathered(group, part, 1, length)
    total = reduced(group, whole, 1)
    (back * mine(8, 3, length, 2)).sum().backward()
    assert whole.grad is not None
    return part.detach(), back.detach(), total.detach(), whole.grad


@pytest.mark.gate(cases=3)
@TRANSPORTS
@pytest.mark.parametrize("size, length", [(2, 5), (3, 7), (4, 6)])
def test_parts_need_not_be_equal(ranks: RankPool, size: int, length: int, over_tcp: bool) -> None:
    whole = mine(7, 3, length, 2)
    parts = [Shard.even(1, length, size).take(whole, rank) for rank in range(size)]
    for rank, (part, back, total, gradient) in enumerate(ranks.run(on_all, size, over_tcp, uneven, length)):
        assert torch.equal(part, parts[rank]) and torch.equal(back, whole) and torch.equal(total, size * parts[rank])
        # Of a part it is the sum of everybody's, and they are gathered.
        assert torch.equal(gradient, size * mine(8, 3, length, 2))


def without_gradients(group: TensorParallelGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = mine(group.rank, 5).to(dtype).requires_grad_(dtype.is_floating_point)
    return summed(group, x), summed(group, x, "max")


@pytest.mark.gate(cases=2)
@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32])
def test_sums_and_maxima_of_every_type(ranks: RankPool, dtype: torch.dtype, over_tcp: bool) -> None:
    parts = torch.stack(everybodys(3, 5))
    for total, most in ranks.run(on_all, 3, over_tcp, without_gradients, dtype):
        assert total.dtype == most.dtype == dtype and not total.requires_grad
        assert torch.equal(total.double(), parts.sum(0)) and torch.equal(most.double(), parts.amax(0))


def by_name() -> Tensor:
    return summed(TensorParallelGroup(dist.group.WORLD.group_name), mine(dist.get_rank(), 5))


def test_a_c10d_group_is_known_by_its_name(ranks: RankPool) -> None:
    for total in ranks.run(by_name, 2):
        assert torch.equal(total, mine(0, 5) + mine(1, 5))


def started(group: TensorParallelGroup) -> tuple[list[Tensor], Tensor]:
    """Sums in place, waited for in another order than that of their start."""
    tensors = [mine(10 * i + group.rank, 50, 20) for i in range(6)]
    waits = [group.start(tensor, REDUCE, REDUCE.forward) for tensor in tensors]
    for i in (5, 0, 3, 1, 2, 4):
        assert waits[i]().data_ptr() == tensors[i].data_ptr()
    y = mine(group.rank, 4).requires_grad_()
    z = 2 * y
    total = torch.ops.fold3d.tp_wait(torch.ops.fold3d.tp_all_reduce_start(z, group.name), z, z.shape)
    (total * mine(5, 4)).sum().backward()
    assert torch.equal(total.detach(), 2 * (mine(0, 4) + mine(1, 4))) and y.grad is not None
    return tensors, y.grad


@TRANSPORTS
def test_sums_that_are_started_and_waited_for(ranks: RankPool, over_tcp: bool) -> None:
    for tensors, gradient in ranks.run(on_all, 2, over_tcp, started):
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, mine(10 * i, 50, 20) + mine(10 * i + 1, 50, 20))
        assert torch.equal(gradient, 2 * mine(5, 4))


def gradients_of_gradients(group: TensorParallelGroup) -> list[Tensor]:
    """Of (1 + 2) * x ** 3, in a region that begins with the whole, and with a part, and of x ** 3 on parts."""
    x = torch.tensor([1.5, 0.5], dtype=torch.float64, requires_grad=True)
    scatter, join = Exchange.scatter(0, 2), Exchange.gather(0, 2, sums=False)
    part = group.exchange(x, scatter)
    region = (group.rank + 1) * group.exchange(part, Exchange.gather(0, 2, sums=True)) ** 3
    made = [
        group.exchange((group.rank + 1) * group.exchange(x, COPY) ** 3, REDUCE),
        group.exchange(group.exchange(region, Exchange.reduce_scatter(0, 2)), join),
        3 * group.exchange(part**3, join),
    ]
    first = [torch.autograd.grad(one.sum(), x, create_graph=True)[0] for one in made]
    return [torch.autograd.grad(one.sum(), x)[0] for one in first]


def test_gradients_of_gradients(ranks: RankPool) -> None:
    for found in ranks.run(on_all, 2, True, gradients_of_gradients):
        for second in found:
            assert second.tolist() == pytest.approx([18 * 1.5, 18 * 0.5])


def test_a_rank_alone_changes_nothing() -> None:
    group = TensorParallelGroup(None)
    x = mine(0, 4, 2)
    assert group.size == 1 and group.rank == 0
    assert group.exchange(x, COPY) is x and group.exchange(x, REDUCE) is x
    assert gathered(group, x, 0) is x and scattered(group, x, 0) is x
