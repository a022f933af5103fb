"""Mixtures whose experts are one grouped product, which torch has not in double precision, are divided as others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fold3d.splitting import plan_sharding
from fold3d.splitting.torch_modes import GROUPED, DoubleMode, grouped_mm
from tests.splitting.models import build
from tests.splitting.shared import compare

ENDS = torch.tensor([8, 8, 24], dtype=torch.int32)
"""Of three groups, of which the second has nothing."""


@pytest.mark.parametrize("ends", [ENDS, ENDS + torch.tensor([0, 0, 8], dtype=torch.int32)], ids=["fewer", "all"])
@pytest.mark.parametrize("shapes", [((32, 16), (3, 16, 8)), ((3, 16, 8), (8, 32)), ((16, 32), (32, 8))], ids=str)
def test_it_is_torch_s(shapes: tuple[tuple[int, ...], tuple[int, ...]], ends: Tensor) -> None:
    draw = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=draw) for shape in shapes)
    expected, found = torch.nn.functional.grouped_mm(a, b, offs=ends), grouped_mm(a, b, offs=ends)
    assert found.shape == expected.shape
    last = int(ends[-1])
    by_rows, by_columns = b.dim() == 3, a.dim() == 3
    here = (slice(0, last),) if by_rows else (slice(None), slice(0, last)) if by_columns else (slice(None),)
    assert torch.allclose(found[here], expected[here], atol=1e-5)


def test_groups_in_both_need_no_ends() -> None:
    a, b = torch.randn(3, 8, 16), torch.randn(3, 16, 8)
    assert torch.allclose(grouped_mm(a, b), torch.nn.functional.grouped_mm(a, b), atol=1e-5)


@pytest.mark.parametrize("function", sorted(GROUPED, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_it_takes_double_precision_and_has_gradients(function) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((24, 16), (3, 16, 8)))
    with DoubleMode():
        assert torch.autograd.gradcheck(lambda x, y: function(x, y, offs=ENDS), (a, b))


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_mixtures_are_divided_as_with_products_expert_by_expert(family: str) -> None:
    tiny = build(family)
    expected = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 2, sequence_parallel=True)
    tiny.model.set_experts_implementation("grouped_mm")
    found = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 2, sequence_parallel=True)
    assert found.shards == expected.shards and found.sequence == expected.sequence
    assert any("experts" in name for name, shard in found.shards.items() if not shard.is_replicated)
    with DoubleMode():
        assert compare(tiny.model, tiny.batch, found) < 1e-10
