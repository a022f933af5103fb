"""Cuts of the model, and what their chunks and buckets cost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fold3d.errors import ConfigError
from fold3d.plan.layout import cut, layout_of
from tests.plan.jobs import make_job

JOB = make_job()
SMALL = make_job(layers=8)


def sizes(ranges, pp=2):
    return [tuple(end - first for first, end in ranges[k : k + pp]) for k in range(0, len(ranges), pp)]


def test_stages_of_a_segment_are_equal():
    assert sizes(cut(JOB, 1)) == [(16, 16)]
    assert sizes(cut(JOB, 4)) == [(4, 4)] * 4
    assert sizes(cut(JOB, 16)) == [(1, 1)] * 16
    for segments in (3, 5, 7, 12):
        pairs = sizes(cut(JOB, segments))
        assert all(first == second for first, second in pairs)
        assert max(pairs)[0] - min(pairs)[0] == 1 and sum(first for first, _ in pairs) == 16


def test_the_first_segment_may_differ():
    small = {"first": 0.25}
    assert sizes(cut(JOB, 4, **small))[0] == (1, 1)
    assert sizes(cut(JOB, 4, **small))[1:] == [(5, 5)] * 3
    assert sizes(cut(JOB, 5, first=1.5))[0] == (4, 4)
    assert sizes(cut(JOB, 16, **small)) == [(1, 1)] * 16  # there is no smaller one


def test_segments_may_grow():
    growing = {"first": 0.5, "last": 1.3, "grow": True}
    assert [first for first, _ in sizes(cut(JOB, 7, **growing))] == [1, 2, 2, 2, 3, 3, 3]
    assert [first for first, _ in sizes(cut(JOB, 16, **growing))] == [1] * 16
    assert cut(JOB, 1, **growing) == cut(JOB, 1)
    falling = [first for first, _ in sizes(cut(JOB, 4, first=1.5, last=0.5, grow=True))]
    assert falling == sorted(falling, reverse=True) and sum(falling) == 16


def test_unequal_blocks_and_leftovers():
    job = make_job(layers=3, pp=2)  # 6 blocks
    slow = dataclasses.replace(job, profile=dataclasses.replace(job.profile, forward=(0, 5, 1, 1, 1, 1, 1, 0)))
    ranges = cut(slow, 1)
    assert ranges == ((0, 1), (1, 6))
    assert [end - first for first, end in cut(make_job(layers=5, pp=1), 2)] in ([2, 3], [3, 2])
    with pytest.raises(ConfigError, match=r"segments=9 times pp=2.*lower segments"):
        cut(make_job(layers=8), 9)


def test_a_model_that_can_be_cut_nowhere_says_why():
    closed = ("", *["it lies inside of a loop"] * (len(SMALL.trace.blocks) - 1))
    job = dataclasses.replace(SMALL, trace=dataclasses.replace(SMALL.trace, borders=closed))
    with pytest.raises(ConfigError, match=r"at 0 places only \(it lies inside of a loop\)"):
        cut(job, 1)


SHARES = st.fixed_dictionaries(
    {
        "first": st.sampled_from((0.25, 0.5, 1.0, 1.5)),
        "last": st.sampled_from((0.5, 1.0, 1.3)),
        "grow": st.booleans(),
    }
)
LATE = {"first": 1.0, "last": 0.5, "grow": False}  # the last one took what others need


@given(times=st.lists(st.floats(0, 10), min_size=16, max_size=16), segments=st.integers(1, 8), shares=SHARES)
@example(times=[1.0] * 8 + [0.01] * 8, segments=7, shares=LATE)
def test_any_times_and_shares_give_chunks_that_can_run(times, segments, shares):
    job = dataclasses.replace(SMALL, profile=dataclasses.replace(SMALL.profile, forward=(0.0, *times, 0.0)))
    ranges = cut(job, segments, **shares)
    assert len(ranges) == 2 * segments
    job.trace.check_ranges(list(ranges))


def test_costs_add_up():
    for bucket_bytes in (0, 1_600_000, 1 << 40):
        layout = layout_of(JOB, cut(JOB, 4), bucket_bytes)
        assert sum(layout.forward) == pytest.approx(2 * 0.317 / 8)
        assert sum(layout.backward) == pytest.approx(2 * 0.775 / 8)
        assert len(layout.buckets) == 8
        for chunk, buckets in enumerate(layout.buckets):
            assert sum(forward for forward, _, _ in buckets) == pytest.approx(layout.forward[chunk])
            assert sum(size for _, _, size in buckets) == 12_500_000 // 16 // 4 * 4 * 4
        assert [len(buckets) for buckets in layout.buckets] == [{0: 4, 1_600_000: 1}.get(bucket_bytes, 1)] * 8
        assert layout.buckets_of(1, 2) == sum(map(len, layout.buckets[1::2]))
        assert layout.update[0] == pytest.approx(4 * 781_248e-9, rel=1e-3)
