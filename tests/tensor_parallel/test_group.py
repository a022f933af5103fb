"""TensorParallelGroup: what Megatron's f and g, and the operations of sequence parallelism, give and pass back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.region import RegionOps
from tests.helpers.ranks import RankPool


def mine(rank: int, *shape: int) -> Tensor:
    """A tensor of small integers, different on every rank: their sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, shape, generator=generator).double()


def everybodys(size: int, *shape: int) -> list[Tensor]:
    return [mine(rank, *shape) for rank in range(size)]


def world() -> TensorParallelGroup:
    group: RegionOps = TensorParallelGroup(dist.group.WORLD)
    assert isinstance(group, TensorParallelGroup)
    return group


def split_mlp() -> tuple[Tensor, ...]:
    """Two linear layers, split by Megatron's way, against both whole: outputs and gradients."""
    group = world()
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    up = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    down = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    part_up = group.part(up.detach(), 1).clone().requires_grad_()
    part_down = group.part(down.detach(), 0).clone().requires_grad_()
    y = group.reduce_from_region((group.copy_to_region(x) @ part_up).tanh() @ part_down)
    y.pow(2).sum().backward()
    got = (y.detach(), x.grad, part_up.grad, part_down.grad)
    x.grad = None
    whole = (x @ up).tanh() @ down
    whole.pow(2).sum().backward()
    assert up.grad is not None and down.grad is not None
    wanted = (whole.detach(), x.grad, group.part(up.grad, 1), group.part(down.grad, 0))
    return tuple((a - b).abs().max() for a, b in zip(got, wanted, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_mlp_is_the_whole_one(ranks: RankPool, size: int) -> None:
    for errors in ranks.run(split_mlp, size):
        assert len(errors) == 4 and max(errors) < 1e-12


def summed_at(dim: int, of_weight: bool) -> tuple[Tensor, Tensor]:
    group = world()
    x = mine(9, 4, 3).requires_grad_()
    indices = torch.tensor([0, 2])
    y = group.copy_weight(x, dim, indices) if of_weight else group.copy_to_region(x, indices)
    (y * mine(group.rank, 4, 3)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dim, of_weight", [(1, False), (0, True), (1, True)])
def test_only_the_gradient_at_the_indices_is_summed(ranks: RankPool, dim: int, of_weight: bool) -> None:
    total = sum(everybodys(2, 4, 3))
    for rank, (y, gradient) in enumerate(ranks.run(summed_at, 2, dim, of_weight)):
        assert torch.equal(y, mine(9, 4, 3))
        wanted = mine(rank, 4, 3)
        wanted.index_copy_(dim, torch.tensor([0, 2]), total.index_select(dim, torch.tensor([0, 2])))
        assert torch.equal(gradient, wanted)


def sequence(dim: int) -> tuple[Tensor, ...]:
    group = world()
    size, rank = group.size, group.rank
    x = mine(rank, 2, 4, 4).requires_grad_()
    seed = [2, 4, 4]
    seed[dim] *= size
    gathered = group.gather_from_sequence_region(x, dim)
    (gathered * mine(10 + rank, *seed)).sum().backward()
    y = mine(rank, *seed).requires_grad_()
    scattered = group.reduce_scatter_to_sequence_region(y, dim)
    (scattered * mine(20 + rank, 2, 4, 4)).sum().backward()
    z = mine(30, *seed).requires_grad_()
    own = group.scatter_to_sequence_region(z, dim)
    (own * mine(20 + rank, 2, 4, 4)).sum().backward()
    assert x.grad is not None and y.grad is not None and z.grad is not None
    return gathered.detach(), x.grad, scattered.detach(), y.grad, own.detach(), z.grad


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [2, 3])
def test_sequence_regions(ranks: RankPool, size: int, dim: int) -> None:
    whole = [2, 4, 4]
    whole[dim] *= size
    gathered = torch.cat(everybodys(size, 2, 4, 4), dim)
    of_gather = torch.stack([mine(10 + rank, *whole) for rank in range(size)]).sum(0).chunk(size, dim)
    scattered = torch.stack(everybodys(size, *whole)).sum(0).chunk(size, dim)
    of_parts = torch.cat([mine(20 + rank, 2, 4, 4) for rank in range(size)], dim)
    for rank, got in enumerate(ranks.run(sequence, size, dim)):
        own = mine(30, *whole).chunk(size, dim)[rank]
        for found, wanted in zip(
            got, (gathered, of_gather[rank], scattered[rank], of_parts, own, of_parts), strict=True
        ):
            assert torch.equal(found, wanted)


def without_gradients() -> tuple[Tensor, Tensor, str]:
    group = TensorParallelGroup(dist.group.WORLD.group_name)
    x = mine(group.rank, 5).requires_grad_()
    with pytest.raises(ValueError) as uneven:
        group.scatter_to_sequence_region(x, 0)
    return group.all_reduce(x), group.all_reduce_max(x), str(uneven.value)


def test_sums_and_maxima_by_the_name_of_a_group(ranks: RankPool) -> None:
    parts = torch.stack(everybodys(3, 5))
    for total, most, uneven in ranks.run(without_gradients, 3):
        assert torch.equal(total, parts.sum(0)) and torch.equal(most, parts.amax(0)) and not total.requires_grad
        assert uneven == "5 elements along dimension 0 are no 3 equal parts"


def test_a_rank_alone_changes_nothing() -> None:
    group = TensorParallelGroup(None)
    x = mine(0, 4, 2)
    assert group.size == 1 and group.rank == 0
    assert group.copy_to_region(x) is x and group.reduce_from_region(x) is x
    assert group.gather_from_sequence_region(x, 0) is x and group.scatter_to_sequence_region(x, 0) is x
