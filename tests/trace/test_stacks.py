"""Models with several stacks of blocks, and those that read earlier values again: every cut equals the whole model."""

from __future__ import annotations

import pytest
import torch

from fold3d.trace import trace
from fold3d.trace.arguments import Arguments
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, record, whole
from tests.trace.stacks import MODELS, build


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("family", MODELS)
def test_every_cut_equals_the_whole_model(family: str) -> None:
    model, batch = build(family)
    recorded = record(model, batch)
    assert not any(recorded.borders)
    want = whole(model, batch)
    for ranges in cuts(len(recorded.blocks)):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_dropout_is_that_of_one_chunk(family: str, recompute: bool) -> None:
    model, batch = build(family, dropout=0.2)
    recorded = record(model, batch)
    key, blocks = (42, 3, 1), len(recorded.blocks)
    want = chained(ranks_of(model, recorded, [(0, blocks)], 1), recorded, 1, batch, key=key)
    for ranges, pp in [([(0, 2), (2, 3), (3, blocks)], 2), ([(i, i + 1) for i in range(blocks)], 2)]:
        ranks = ranks_of(model, recorded, ranges, pp, recompute=recompute)
        assert_equal(chained(ranks, recorded, len(ranges), batch, key=key), want)


def test_what_only_the_returned_object_carries_does_not_travel_for_a_loss() -> None:
    """Features of the images go as far as the text, those of the half way one layer further, and then hidden states
    alone, and what the tower's last block returned no further than the projector, though a pool reads it for nobody; to
    a caller who may read them, the object brings them from the end."""
    model, batch = build("seeing")
    everything, for_loss = record(model, batch), trace(model, example=Arguments.of("", batch).reading(True))
    crossing = [[value.module for one in border for value in one.values] for border in for_loss.crossings]
    layers = [f"language.layers.{number}" for number in range(3)]
    assert crossing[4:] == [["deep", layers[0]], [layers[1]]]
    assert ["projector" in names for names in ([v.module for c in b for v in c.values] for b in everything.crossings)][
        4:
    ] == [True, True]
    ranges = [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    for recorded in (everything, for_loss):
        ranks = ranks_of(model, recorded, ranges, 2)
        for only_loss in (False, True):  # another way to read than was recorded is recorded when it comes
            got = chained(ranks, recorded, len(ranges), batch, only_loss=only_loss)
            assert_equal(got, whole(model, batch))


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("family", MODELS)
def test_evaluation(family: str) -> None:
    model, batch = build(family)
    model.eval()
    recorded = record(model, batch)
    ranges = [(0, 2), (2, 3), (3, len(recorded.blocks))]
    ranks = ranks_of(model, recorded, ranges, 2)
    with torch.no_grad():
        want, inputs = model(**batch), []
        for chunk in range(3):
            rank = ranks[chunk % 2]
            inputs, result = rank.run(chunk, lambda rank=rank: rank._model(**batch), inputs, None)
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(result[name], value), name
