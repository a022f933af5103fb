"""Blocks that decide by what they compute: they are run with made-up numbers, to learn what they return."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import TraceError
from fold3d.trace import trace
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, whole
from tests.trace.zoo import tokens

_KEPT: list[Tensor] = []


class _Experts(nn.Module):
    """Sends each token to the expert that a router chooses, as models do whose code comes with their weights."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept = way, None
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        if self.way == "numbers":
            order = chosen.argsort()
            parts = flat[order].split(torch.bincount(chosen, minlength=3).tolist())
            moved = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
            mixed = torch.empty_like(moved).index_copy(0, order, moved)
        else:
            mixed = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                places = (chosen == number).nonzero()[:, 0]
                if len(places):
                    mixed = mixed.index_add(0, places, expert(flat[places]))
        if self.way == "attribute":
            self.kept = weights.square().mean()
        if self.way == "list":
            _KEPT.append(weights.square().mean())
        if self.way == "in place":
            x.mul_(0.5)
        result = x + scale * (weights[:, None] * mixed).view_as(x)
        return (result, weights.square().mean()) if self.way == "pair" else result


class _Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding, self.scale = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(_Experts(way) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        _KEPT.clear()
        x = self.embedding(input_ids)
        scale = self.scale(x)
        extra: list[Tensor] = []
        for layer in self.layers:
            x = layer(x + 0, scale)
            if self.way == "pair":
                x, loss = x
                extra.append(loss)
            if layer.kept is not None:
                extra.append(layer.kept)
        return x.square().mean() + sum([*extra, *_KEPT])


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("way", ["numbers", "places", "pair"])
def test_every_cut_equals_the_whole_model(way: str) -> None:
    torch.manual_seed(0)
    model = _Model(way).double()
    before = torch.get_rng_state()
    recorded = trace(model, example=tokens())
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(recorded.borders)
    assert any(value.module == "scale" for one in recorded.crossings[2] for value in one.values)
    for ranges in cuts(4):
        got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), tokens())
        assert_equal(got, whole(model, tokens()))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("attribute", "it keeps what it has computed in an attribute"),
        ("list", "it hands what it has computed to somebody in another way than by returning it"),
        ("in place", "it writes into what it is given"),
    ],
)
def test_what_a_result_does_not_say_is_refused(way: str, reason: str) -> None:
    with pytest.raises(
        TraceError, match=f"decides what to compute by a value.*could not be run by itself to find out: {reason}"
    ):
        trace(_Model(way), example=tokens())
    _KEPT.clear()


def test_blocks_that_are_too_large_to_make_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fold3d.trace.made_up.MOST", 100)
    with pytest.raises(TraceError, match="more than 100 weights would have to be made up"):
        trace(_Model("numbers"), example=tokens())


class _Clamp(nn.Module):
    """Keeps the range of what it has seen, as modules that quantise do, and takes another way the first time."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        largest = x.detach().abs().max()
        assert not largest.isnan()
        self.seen = largest[None] if self.seen.max() == 0 else torch.maximum(self.seen, largest)
        if self.way == "shape":
            return x[:, : 1 + int((x[0, :, 0] > 0).sum())]
        return x.clamp(-0.5 * self.seen, 0.5 * self.seen)


class _Clamping(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.first, self.last = _Clamp(way), _Clamp(way)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.embedding(input_ids))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x).square().mean()


def test_modules_around_the_blocks_may_decide_by_what_they_compute() -> None:
    torch.manual_seed(0)
    model = _Clamping("clamp").double()
    recorded = trace(model, example=tokens())
    assert recorded.prologue == ("embedding", "first")
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, 2)
        assert_equal(chained(ranks, recorded, len(ranges), tokens()), whole(copy.deepcopy(model), tokens()))
        assert ranks[0]._model.first.seen.item() > 0  # the rank that runs it has its buffer


def test_shapes_that_depend_on_what_is_computed_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(TraceError, match="the shapes of what it returns depend on what it computes"):
        trace(_Clamping("shape").double(), example=tokens())
