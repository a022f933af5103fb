"""BorderParts: a stage's ranks send parts of what all of them have, and the next stage's ranks put them together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.stage.sharded_chunk import BorderParts
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.trace import Trace, trace
from fold3d.trace.module_results import Crossing, Value
from tests.helpers.models import build, gpt2_config
from tests.helpers.ranks import RankPool

WIDTH = 16


def recording() -> Trace:
    """Of two blocks that hand on a hidden state, a mask as long as samples are, and numbers."""
    found = trace(build(gpt2_config()))
    shapes = (((2, 8, WIDTH), torch.float64), ((2, 1, 8, 8), torch.float64), ((2, WIDTH), torch.int64))
    crossing = tuple(
        Crossing(values=(Value(found.blocks[0], 0, number),), shape=shape, dtype=dtype, modified=False)
        for number, (shape, dtype) in enumerate(shapes)
    )
    return replace(found, crossings=(crossing,) * len(found.blocks))


def travel() -> tuple[list[tuple[int, ...]], list[bool], list[Tensor | None]]:
    group = TensorParallelGroup(dist.group.WORLD)
    found = recording()
    ranges = [(0, 1), (1, len(found.blocks))]
    parts = BorderParts(found, ranges, {WIDTH, 3 * WIDTH}, group)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    mask = torch.randn(2, 1, 8, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    numbers = torch.arange(2 * WIDTH).reshape(2, WIDTH)
    sent = parts.send(0, [hidden * 2, mask, numbers])
    arrived = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in sent]
    whole: list[Any] = parts.receive(1, arrived)
    same = [torch.equal(a, b) for a, b in zip(whole, (hidden * 2, mask, numbers), strict=True)]
    (whole[0] * hidden.detach()).sum().backward()
    gradient = arrived[0].grad
    assert gradient is not None and gradient.shape == arrived[0].shape
    sent[0].backward(gradient)
    assert hidden.grad is not None
    return [tuple(t.shape) for t in sent], same, [hidden.grad - 2 * hidden.detach()]


@pytest.mark.gate
def test_parts_and_their_gradients(ranks: RankPool) -> None:
    for size in (2, 4):
        for shapes, same, differences in ranks.run(travel, size):
            assert shapes == [(2, 8, WIDTH // size), (2, 1, 8, 8), (2, WIDTH)]
            assert all(same)
            assert all(d is not None and not d.any() for d in differences)


def test_a_width_that_does_not_divide_travels_whole(ranks: RankPool) -> None:
    for shapes, same, _ in ranks.run(travel_by_three, 3):
        assert shapes == [(2, 8, WIDTH), (2, 1, 8, 8), (2, WIDTH)] and all(same)


def travel_by_three() -> tuple[list[tuple[int, ...]], list[bool], list[Tensor | None]]:
    group = TensorParallelGroup(dist.group.WORLD)
    found = recording()
    parts = BorderParts(found, [(0, 1), (1, len(found.blocks))], {WIDTH}, group)
    tensors = [torch.ones(2, 8, WIDTH, dtype=torch.float64), torch.ones(2, 1, 8, 8), torch.ones(2, WIDTH)]
    sent = parts.send(0, tensors)
    return [tuple(t.shape) for t in sent], [a is b for a, b in zip(parts.receive(1, sent), sent, strict=True)], []
