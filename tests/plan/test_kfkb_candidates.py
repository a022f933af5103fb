"""The points of kFkB on the memory limit curve, against all points that there are."""

from __future__ import annotations

import pytest

from fold3d import schedule
from fold3d.plan.kfkb_candidates import Grouped, kfkb_candidates


def stash(samples: int, pp: int, one: Grouped) -> int:
    """Samples whose activations the fullest stage keeps."""
    made = schedule.generate("kfkb", pp=pp, micro_batches=samples // one.b, group_size=one.k)
    return one.b * max(schedule.peak_stash(made))


@pytest.mark.parametrize(
    "samples, pp, room", [(96, 4, 48), (24, 3, 7), (24, 3, 24), (12, 2, 1), (30, 2, 17), (16, 1, 5)]
)
def test_what_is_returned_fits_and_is_dominated_by_nothing_that_fits(samples: int, pp: int, room: int) -> None:
    everything = [Grouped(k, b) for b in range(1, samples + 1) if samples % b == 0 for k in range(1, samples // b + 1)]
    fitting = [one for one in everything if stash(samples, pp, one) <= room]
    best = [
        one for one in fitting if not any(other != one and other.k >= one.k and other.b >= one.b for other in fitting)
    ]
    found = kfkb_candidates(samples, lambda one: stash(samples, pp, one) <= room)
    assert found == sorted(best)
    assert [one.b for one in found] == sorted((one.b for one in found), reverse=True)


def test_the_curve_of_a_stash_of_48_samples() -> None:
    found = kfkb_candidates(96, lambda one: stash(96, 4, one) <= 48)
    assert [(one.k, one.b) for one in found] == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]


def test_nothing_fits() -> None:
    assert kfkb_candidates(8, lambda one: False) == []
