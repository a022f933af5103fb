"""Models whose own code, or whose blocks, write into tensors in place: exact, or refused where a cut would be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fold3d.trace import trace
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, whole


class Block(nn.Module):
    """Adds to what it was given, in its memory if `writes`."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(8, 8), writes

    def forward(self, x: Tensor) -> Tensor:
        if not self.writes:
            return x + torch.tanh(self.linear(x))
        x += torch.tanh(self.linear(x.clone()))
        return x


Way = Callable[["Writing", Tensor, Tensor], Tensor]


class Writing(nn.Module):
    def __init__(self, way: Way, writes: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block(writes) for _ in range(4))
        self.last = nn.Linear(8, 1)
        self.way = way

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.way(self, self.first(inputs), self.second(inputs))).sum()


def after_each_block(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x += 1.0
        x *= 1.5
    return x


def after_the_first_block(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number == 0:
            x += 1.0
    return x


def before_the_blocks(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    x *= 3.0
    early = early + x
    for layer in model.layers:
        x = layer(x)
    return x + early


def between_the_blocks(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number in (0, 2):
            early += number + 1.0
    return x + early


def of_several_blocks(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    """Each is read at the end, and has been written to."""
    found = []
    for layer in model.layers:
        x = layer(x)
        found.append(x)
        x.mul_(2.0)
    return torch.stack(found).sum(0)


def a_part_of_it(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number == 1:
            early[:, 2:4].mul_(0.5)
    return x + early


def in_lists(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number == 1:
            torch._foreach_add_([early], 1.0)  # returns nothing
    return x + early


def handed_on(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def result_ignored(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    for layer in model.layers:
        layer(x)
    return x


def own_memory(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    x = x * 2.0
    for layer in model.layers:
        layer(x)
    return x


def collected(model: Writing, x: Tensor, early: Tensor) -> Tensor:
    """All are the same tensor."""
    found = []
    for layer in model.layers:
        x = layer(x)
        found.append(x)
    return torch.stack(found).sum(0)


def built(way: Way, writes: bool) -> tuple[Writing, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Writing(way, writes).double(), {"inputs": torch.randn(4, 8, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("way", "writes"),
    [
        (after_each_block, False),
        (after_the_first_block, False),
        (before_the_blocks, False),
        (between_the_blocks, False),
        (of_several_blocks, False),
        (a_part_of_it, False),
        (in_lists, False),
        (handed_on, True),
        (after_each_block, True),
    ],
)
def test_what_the_models_own_code_writes_is_written_in_every_part(way: Way, writes: bool) -> None:
    model, batch = built(way, writes)
    recorded = trace(model, example=batch)
    assert not any(recorded.borders)
    want = whole(model, batch)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, min(2, len(ranges)))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


@pytest.mark.parametrize("way", [result_ignored, own_memory, collected])
def test_what_blocks_write_is_refused_where_it_is_read_by_another_name(way: Way) -> None:
    model, batch = built(way, writes=True)
    borders = trace(model, example=batch).borders
    assert any(borders)
    want = whole(model, batch)
    for ranges in cuts(4):
        if not any(borders[first] for first, _ in ranges):
            recorded = trace(model, example=batch)
            assert_equal(chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), batch), want)
