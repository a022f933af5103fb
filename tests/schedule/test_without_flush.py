"""1F1B without a flush: the version that each micro-batch finds, and what the simulator says of it."""

from __future__ import annotations

import pytest

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.schedule import Kind, Schedule


def versions(pp: int, m: int, steps: int) -> dict[tuple[int, str, int], int]:
    """Returns, for (stage, "F" or "B", running number) the updates that the weights have: the lists are walked with the
    rule that the runtime follows."""
    first, every, drain = schedules.without_flush("1f1b", pp=pp, micro_batches=m)
    found = {}
    for stage in range(pp):
        for step, lists in enumerate([first, *[every] * (steps - 1), drain]):
            seen: set[int] = set()
            for action in lists.ranks[stage]:
                if action.kind == Kind.FORWARD:
                    seen.add(action.micro_batch)
                if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    own = step - (action.micro_batch not in seen)
                    found[stage, action.kind.text, own * m + action.micro_batch] = max(own - 1, 0)
    return found


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (4, 4), (4, 5), (3, 8)])
def test_both_passes_of_a_micro_batch_find_the_version_of_the_dissertation(pp: int, m: int) -> None:
    """Section 3.1: micro-batch k, from 1, takes version max(floor((k - 1) / m) - 1, 0), on all stages."""
    steps = 5
    found = versions(pp, m, steps)
    assert found == {
        (stage, kind, k - 1): max((k - 1) // m - 1, 0)
        for stage in range(pp)
        for kind in "FB"
        for k in range(1, steps * m + 1)
    }


def test_an_update_has_a_window_on_every_stage() -> None:
    """No forward of a step stands before the REDUCE_GRAD of the step before the one before."""
    for pp in (2, 4, 8):
        _, every, _ = schedules.without_flush("1f1b", pp=pp, micro_batches=pp)
        for actions in every.ranks:
            assert [a.kind for a in actions].index(Kind.REDUCE) < len(actions) - 1


def _as_it_is_drawn(lists: Schedule, stage: int) -> str:
    return " ".join(a.text for a in lists.ranks[stage] if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE))


def test_lists_of_two_stages() -> None:
    first, every, drain = schedules.without_flush("1f1b", pp=2, micro_batches=2)
    assert _as_it_is_drawn(first, 0) == "0F0 0F1"
    assert _as_it_is_drawn(first, 1) == "1F0 1B0 1F1"
    assert _as_it_is_drawn(every, 0) == "0B0 0F0 0B1 0REDUCE_GRAD 0F1"
    assert _as_it_is_drawn(every, 1) == "1B1 1REDUCE_GRAD 1F0 1B0 1F1"
    assert _as_it_is_drawn(drain, 0) == "0B0 0B1 0REDUCE_GRAD"
    assert _as_it_is_drawn(drain, 1) == "1B1 1REDUCE_GRAD"


def test_what_cannot_be_had_without_a_flush_is_refused() -> None:
    with pytest.raises(ConfigError, match="as many micro-batches as stages"):
        schedules.without_flush("1f1b", pp=4, micro_batches=3)
    with pytest.raises(ConfigError, match="zb_h1"):
        schedules.without_flush("zb_h1", pp=2, micro_batches=4)
