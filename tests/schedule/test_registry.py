"""The registry: names, parameters, and that the fold family contains the classical schedules."""

from __future__ import annotations

import pytest

from fold3d import schedule
from fold3d.errors import ConfigError
from tests.schedule.cases import sizes


def test_names():
    assert schedule.names() == ["gpipe", "1f1b", "zb_h1", "interleaved", "fold", "aiao"]
    assert all(info.help for info in schedule.registry())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "zigzag"}, "unknown schedule 'zigzag'.*gpipe, 1f1b, zb_h1, interleaved, fold, aiao"),
        ({"name": "gpipe", "pp": 0}, "pp must be at least 1, got 0"),
        ({"name": "aiao", "segments": 0}, "segments must be at least 1, got 0"),
        ({"name": "aiao", "micro_batches": -1}, "micro_batches must be at least 1, got -1"),
        ({"name": "1f1b", "segments": 2}, "segments=2 has no effect on schedule '1f1b'"),
        ({"name": "aiao", "group_size": 2}, "group_size=2 has no effect on schedule 'aiao'"),
        ({"name": "fold", "group_size": 0}, "group_size must be at least 1, got 0"),
        ({"name": "interleaved", "turn": "all"}, "turn='all' has no effect on schedule 'interleaved'"),
        ({"name": "fold", "turn": "left"}, "turn='left' is unknown: set turn to 'all' or '1f1b'"),
    ],
)
def test_bad_parameters_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        schedule.generate(**({"pp": 2, "segments": 1, "micro_batches": 4} | arguments))


def fold(pp, segments, m, group_size, turn):
    return schedule.generate("fold", pp=pp, segments=segments, micro_batches=m, group_size=group_size, turn=turn)


def test_the_family_contains_the_classical_schedules():
    for pp, segments, m in sizes():
        if segments == 1:
            gpipe = schedule.generate("gpipe", pp=pp, micro_batches=m)
            one_f_one_b = schedule.generate("1f1b", pp=pp, micro_batches=m)
            assert fold(pp, 1, m, m, "all") == gpipe
            assert fold(pp, 1, m, 1, "all") == one_f_one_b  # kFkB with k = 1
            assert fold(pp, 1, m, min(m, 3), "1f1b") == one_f_one_b  # N says nothing about a single segment
        size = {"pp": pp, "segments": segments, "micro_batches": m}
        assert fold(pp, segments, m, pp, "1f1b") == schedule.generate("interleaved", **size)
        assert fold(pp, segments, m, m, "all") == schedule.generate("aiao", **size)


def test_kfkb_is_k_merged_copies_of_1f1b():
    """Ada-Grouper section 5.4: k copies of the 1F1B plan, merged action by action."""
    for pp in range(1, 6):
        for k in range(1, 5):
            for groups in range(1, 5):
                expected = [
                    [(a.kind, a.micro_batch * k + i) for a in actions for i in range(k)]
                    for actions in schedule.generate("1f1b", pp=pp, micro_batches=groups).ranks
                ]
                found = fold(pp, 1, groups * k, k, "all")
                assert [[(a.kind, a.micro_batch) for a in actions] for actions in found.ranks] == expected


def test_aiao_is_algorithm_1():
    """Fold3D Algorithm 1: segments upwards with all forwards, then segments downwards with all backwards."""
    pp, segments, m = 3, 2, 4
    for stage, actions in enumerate(schedule.generate("aiao", pp=pp, segments=segments, micro_batches=m).ranks):
        expected = []
        for j in range(segments):
            expected += [f"{j * pp + stage}F{k}" for k in range(m)]
        for j in reversed(range(segments)):
            expected += [f"{j * pp + stage}B{k}" for k in range(m)]
        assert [a.text for a in actions] == expected


def test_aiao_can_turn_one_by_one_in_its_last_segment():
    plain = schedule.generate("aiao", pp=2, segments=2, micro_batches=4)
    turned = fold(2, 2, 4, 4, "1f1b")
    assert [a.text for a in turned.ranks[1]] == (
        ["1F0", "1F1", "1F2", "1F3", "3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3", "1B0", "1B1", "1B2", "1B3"]
    )
    assert schedule.unit_timeline(turned).makespan == schedule.unit_timeline(plain).makespan
    assert schedule.peak_stash(turned)[1] == 5 < schedule.peak_stash(plain)[1] == 8
