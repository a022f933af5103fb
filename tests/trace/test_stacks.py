"""Models with several stacks of blocks, and those that read earlier values again: every cut equals the whole model."""

from __future__ import annotations

import pytest
import torch

from tests.trace.chains import assert_equal, chained, cuts, ranks_of, record, whole
from tests.trace.stacks import MODELS, build


@pytest.mark.parametrize("family", MODELS)
def test_every_cut_equals_the_whole_model(family: str) -> None:
    model, batch = build(family)
    recorded = record(model, batch)
    assert not any(recorded.borders)
    want = whole(model, batch)
    for ranges in cuts(len(recorded.blocks)):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


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
