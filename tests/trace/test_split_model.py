"""SplitModel: every cut of every family equals the whole model."""

from __future__ import annotations

import pytest

from tests.trace.chains import assert_equal, chained, cuts, ranks_of, record, whole
from tests.trace.zoo import FAMILIES, build, plain, tokens


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_equals_the_whole_model(family: str, padded: bool) -> None:
    model = build(family)
    recorded = record(model)
    batch = tokens(padded=padded)
    want = whole(model, batch)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


@pytest.mark.parametrize("style", ["tensor", "pair", "constants", "in_place"])
def test_every_cut_of_a_plain_module_equals_the_whole(style: str) -> None:
    model = plain(style)
    batch = tokens()
    recorded = record(model, batch)
    assert not any(recorded.borders)
    want = whole(model, batch)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)
