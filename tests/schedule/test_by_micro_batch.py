"""Steps of one micro-batch with an update after each (PipeDream): the versions that each stage finds, walked."""

from __future__ import annotations

import pytest

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.schedule import Kind


def walked(pp: int, steps: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns, for (stage, micro-batch), how many updates the stage has made before its forward, and before its
    backward, where the lists run as they are made."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for stage in range(pp):
        updates, before = 0, {}
        for step, lists in enumerate(schedules.by_micro_batch(pp, steps)):
            for action in lists.ranks[stage]:
                if action.kind == Kind.FORWARD:
                    assert action.micro_batch == step % pp
                    before[step] = updates
                if action.kind == Kind.BACKWARD:
                    number = step - (pp - 1 - stage)
                    assert action.micro_batch == number % pp
                    found[stage, number] = (before.pop(number), updates)
                updates += action.kind == Kind.REDUCE
        assert not before and updates == steps
    return found


@pytest.mark.parametrize(("pp", "steps"), [(2, 1), (2, 7), (4, 2), (4, 9), (5, 12)])
def test_each_stage_finds_the_versions_of_the_dissertation(pp: int, steps: int) -> None:
    """Section 2.3: input t, from 1, takes version max(t - (p - s + 1), 0) on stage s, from 1, with weight stashing,
    which is the newest there; and max(t - p, 0) on all stages with vertical sync. Without either its backward would
    find version t - 1."""
    for (stage, number), (forward, backward) in walked(pp, steps).items():
        t, s = number + 1, stage + 1
        assert forward == max(t - (pp - s + 1), 0) == _C.version_of("stashing", pp, 1, stage, number)
        assert _C.version_of("vertical_sync", pp, 1, stage, number) == max(t - pp, 0) <= forward
        assert backward == t - 1
        for rule in ("stashing", "vertical_sync"):  # the version is still there when its backward comes
            assert backward - _C.version_of(rule, pp, 1, stage, number) < _C.live_versions(rule, pp, stage)


def test_versions_of_the_fifth_input() -> None:
    """Figure 2.8 has four stages; 2BW's table has m = 4."""
    assert [_C.version_of("stashing", 4, 1, stage, 4) for stage in range(4)] == [1, 2, 3, 4]
    assert [_C.live_versions("stashing", 4, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [_C.version_of("2bw", 4, 4, 0, k) for k in range(20)] == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4
    with pytest.raises(ValueError, match="2bw, stashing or vertical_sync"):
        _C.live_versions("naive", 4, 0)
    with pytest.raises(ConfigError, match="must be positive"):
        schedules.by_micro_batch(2, 0)
