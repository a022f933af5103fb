"""torch.ops.fold3d.tp_*matmul*: the bits of computing and communicating one after the other, and what torch asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d.tensor_parallel.group import GroupFusedOps, TensorParallelGroup
from fold3d.tensor_parallel.region import COPY, REDUCE, FusedOps
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.test_group import TRANSPORTS, gathered, mine, on_all, reduced
from tests.tensor_parallel.test_operators import CHECKS

SHAPES = [(1, 301, 40), (3, 203, 40), (9, 35, 40), (603, 1, 40), (7, 40)]
"""Of one sample and of several, which do not divide; the first four are cut into several exchanges with an output of
250 columns, in fp64."""


def checks(group: TensorParallelGroup) -> dict[str, dict[str, str]]:
    x, gradient = mine(group.rank, 2, 3, 4).requires_grad_(), mine(group.rank, 2, 6, 5)
    up, down = mine(2, 4, 5).requires_grad_(), mine(3, 7, 4).t().requires_grad_()
    whole = mine(4, 2, 6, 4)
    arguments: dict[str, tuple[Any, ...]] = {
        "tp_all_gather_matmul": (x, [up, down], 1, 6, group.name),
        "tp_copy_matmul": (x, [up, down], group.name),
        "tp_matmul_all_reduce": (x, up, group.name),
        "tp_matmul_reduce_scatter": (x, up, 1, group.name),
        "tp_matmuls_backward": ([gradient], whole, whole, [up.detach()], 1, group.name, [True]),
    }
    ops = torch.ops.fold3d
    return {
        name: torch.library.opcheck(getattr(ops, name).default, given, test_utils=CHECKS, raise_exception=False)
        for name, given in arguments.items()
    }


def test_the_operators_are_what_torch_expects(ranks: RankPool) -> None:
    for results in ranks.run(on_all, 2, True, checks, timeout=200):
        assert results == dict.fromkeys(results, dict.fromkeys(CHECKS, "SUCCESS"))


class Apart:
    """FusedOps that compute, then communicate."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group

    def copy_matmul(self, x: Tensor, weights: Iterable[Tensor]) -> list[Tensor]:
        copied = self._group.exchange(x, COPY)
        return [copied @ weight for weight in weights]

    def all_gather_matmul(
        self, x: Tensor, weights: Iterable[Tensor], dim: int, length: int
    ) -> tuple[Tensor, list[Tensor]]:
        whole = gathered(self._group, x, dim, length)
        return whole, [whole @ weight for weight in weights]

    def matmul_all_reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._group.exchange(x @ weight, REDUCE)

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        return reduced(self._group, x @ weight, dim)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums_of(ops: FusedOps, group: TensorParallelGroup, shape: tuple[int, ...]) -> list[Tensor]:
    """Sums over the ranks whose summands are rounded once, however they are computed."""
    dim, x, weight = len(shape) - 2, drawn(10 + group.rank, *shape[:-1], 1), drawn(50 + group.rank, 1, 250)
    return [ops.matmul_all_reduce(x, weight), ops.matmul_reduce_scatter(x, weight, dim)]


def results_of(ops: FusedOps, group: TensorParallelGroup, shape: tuple[int, ...]) -> list[Tensor | None]:
    """Everything that the operators return, and all gradients."""
    rank, width = group.rank, shape[-1]
    dim = len(shape) - 2
    rows = shape[dim] // group.size + (rank < shape[dim] % group.size)
    out: list[Tensor | None] = []

    def run(make: Callable[..., Iterable[Tensor]], *leaves: Tensor) -> None:
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        made = list(make(*given))
        loss = torch.stack([(y * drawn(number, *y.shape)).sum() for number, y in enumerate(made)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        out.extend([*(y.detach() for y in made), *(leaf.grad for leaf in given)])

    x, part = drawn(10 + rank, *shape), drawn(20 + rank, *shape[:dim], rows, width)
    up, other, down = drawn(30 + rank, width, 250), drawn(40 + rank, 250, width), drawn(50 + rank, width, 250)

    def gathers(x: Tensor, up: Tensor, other: Tensor) -> list[Tensor]:
        whole, products = ops.all_gather_matmul(x, [up, other.t()], dim, shape[dim])
        return [whole, *products]

    run(lambda x, a, b: ops.copy_matmul(x, [a, b.t()]), drawn(7, *shape), up, other)
    run(gathers, part, up, other)
    run(lambda x, a: [ops.matmul_all_reduce(x, a)], x, down)
    run(lambda x, a: [ops.matmul_reduce_scatter(x, a, dim)], x, down)
    return out


def differences(group: TensorParallelGroup, over_tcp: bool) -> list[list[float]]:
    """Of each shape, relative to the largest element."""
    return [_differences(group, over_tcp, shape) for shape in SHAPES]


def _differences(group: TensorParallelGroup, over_tcp: bool, shape: tuple[int, ...]) -> list[float]:
    fused, apart = GroupFusedOps(group.name, group.kept), Apart(group)
    for one, other in zip(sums_of(fused, group, shape), sums_of(apart, group, shape), strict=True):
        assert not over_tcp or torch.equal(one, other), "another order of sums"
    out = []
    for one, other in zip(results_of(fused, group, shape), results_of(apart, group, shape), strict=True):
        assert one is not None and other is not None and one.shape == other.shape
        out.append(float((one - other).abs().max() / other.abs().max()) if one.numel() else 0.0)
    return out


@pytest.mark.gate(cases=1)
@TRANSPORTS
@pytest.mark.parametrize("size", [2, 3])
def test_they_give_what_computing_and_then_communicating_gives(ranks: RankPool, size: int, over_tcp: bool) -> None:
    """To rounding: a library may order a product's sums by how many rows it computes."""
    for found in ranks.run(on_all, size, over_tcp, differences, over_tcp, timeout=100):
        assert all(len(errors) == 17 and max(errors) < 1e-13 for errors in found), found
