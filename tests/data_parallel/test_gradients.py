"""Norms of gradients that several ranks hold in part, and sums that travel together."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.gradients import multiply, reduce_joined, sum_of_squares
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.sharding.shard import Shard
from fold3d.topology import Submesh

FUSED = Shard(0, 6, (((0, 2), (4, 5)), ((2, 4), (4, 5)), ((0, 2), (5, 6))))
"""Some indices are held by one rank, some by two."""


def shares_of(rank: int) -> torch.Tensor:
    return torch.tensor(FUSED.copies(rank), dtype=torch.float64).reciprocal()[:, None]


def test_what_overlaps_counts_once() -> None:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    parts = [(FUSED.take(whole, rank), shares_of(rank)) for rank in range(3)]
    total = sum(sum_of_squares([], [part]) for part in parts)
    torch.testing.assert_close(total, whole.double().square().sum(), rtol=1e-12, atol=0)
    assert sum_of_squares([]).dtype == torch.float64 and sum_of_squares([]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_factor_may_be_a_tensor(dtype: torch.dtype) -> None:
    """As where the clip coefficient stays on a device: the bits are those of the number, and gradients of 16 bits are
    rounded once, not the factor."""
    number = torch.tensor(0.7, dtype=torch.promote_types(dtype, torch.float32))
    given = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1000, 7)]
    found = [one.clone() for one in given]
    multiply(found, number)
    assert all(
        torch.equal(one, (other.to(number.dtype) * number).to(dtype)) for one, other in zip(found, given, strict=True)
    )
    if dtype.itemsize >= 4:
        by_number = [one.clone() for one in given]
        multiply(by_number, float(number))
        assert all(torch.equal(one, other) for one, other in zip(found, by_number, strict=True))
    before = found[0].clone()
    multiply(found, 1.0)
    assert torch.equal(found[0], before)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_shard_of_a_bucket_knows_its_elements(replicas: int) -> None:
    """The pieces of all replicas together weigh a parameter as it is weighed whole, in the order of its memory."""
    spec = BucketSpec(chunk=0, names=("a", "b"), modules=(), chunks=(), summed_over=Submesh(pp=(0,)), planned=0)
    parameters = {"a": Parameter(torch.zeros(50)), "b": Parameter(torch.zeros(5, 30).t())}
    value = torch.arange(30.0)[:, None]
    found = torch.cat(
        [
            piece.part_of(value)
            for rank in range(replicas)
            for piece in Bucket(0, spec, parameters, replicas, rank).pieces
            if piece.name == "b"
        ]
    )
    assert torch.equal(found, torch.arange(30.0).repeat(5))


def test_tensors_of_a_dtype_are_reduced_together() -> None:
    tensors = [torch.ones(2, 3), torch.full((4,), 2.0, dtype=torch.float64), torch.full((0,), 1.0), torch.ones(())]
    sizes = []

    def double(tensor: torch.Tensor) -> None:
        sizes.append((tensor.dtype, tensor.numel()))
        tensor.mul_(2)

    reduce_joined(tensors, double)
    assert sizes == [(torch.float32, 7), (torch.float64, 4)]
    assert [tensor.sum().item() for tensor in tensors] == [12.0, 16.0, 0.0, 2.0]
