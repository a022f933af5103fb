"""cut_buckets: by hand, and what must hold for any layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold3d.errors import ConfigError
from fold3d.placement.buckets import cut_buckets


@pytest.mark.parametrize(
    "layers, least, buckets",
    [
        ([], 5, []),
        ([0, 0], 5, []),
        ([3], 5, [(0, 1)]),
        ([3, 3, 3], 0, [(0, 1), (1, 2), (2, 3)]),
        ([3, 3, 3, 3], 6, [(0, 2), (2, 4)]),
        ([3, 3, 3, 3, 3], 6, [(0, 2), (2, 5)]),
        ([9, 1, 1, 9], 2, [(0, 1), (1, 3), (3, 4)]),
        ([0, 3, 0, 3, 0], 0, [(0, 2), (2, 5)]),
        ([1, 1], 5, [(0, 2)]),
    ],
)
def test_by_hand(layers, least, buckets):
    assert cut_buckets(layers, least) == buckets


@given(st.lists(st.integers(0, 50)), st.integers(0, 200))
def test_buckets_cover_the_layers_and_are_large_enough(layers, least):
    buckets = cut_buckets(layers, least)
    if not any(layers):
        assert buckets == []
        return
    assert [first for first, _ in buckets] == [0, *(end for _, end in buckets[:-1])] and buckets[-1][1] == len(layers)
    sizes = [sum(layers[first:end]) for first, end in buckets]
    assert min(sizes) > 0
    assert len(sizes) == 1 or min(sizes) >= least
    for first, end in buckets[:-1]:  # none is larger than the rule needs
        assert sum(layers[first : end - 1]) < max(1, least)


def test_negative_sizes_are_refused():
    with pytest.raises(ConfigError, match="bucket_bytes=-1"):
        cut_buckets([1], -1)
    with pytest.raises(ConfigError, match="negative"):
        cut_buckets([1, -1], 0)
