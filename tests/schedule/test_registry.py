"""The registry: names, parameters, and that the fold family contains the classical schedules."""

from __future__ import annotations

import pytest

from fold3d import schedule
from fold3d.errors import ConfigError
from tests.schedule.cases import sizes


def test_names():
    plain = ["gpipe", "1f1b", "kfkb", "shifted_critical_path", "zb_h1", "zb_v"]
    assert schedule.names() == [*plain, "interleaved", "fold", "aiao"]
    assert all(info.help for info in schedule.registry())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "zigzag"}, "unknown schedule 'zigzag'.*gpipe, 1f1b, kfkb, .*zb_h1, zb_v, interleaved, fold, aiao"),
        ({"name": "gpipe", "pp": 0}, "pp must be at least 1, got 0"),
        ({"name": "aiao", "segments": 0}, "segments must be at least 1, got 0"),
        ({"name": "aiao", "micro_batches": -1}, "micro_batches must be at least 1, got -1"),
        ({"name": "1f1b", "segments": 2}, "segments=2 has no effect on schedule '1f1b'"),
        ({"name": "zb_v", "segments": 3}, "segments=3: schedule 'zb_v' has another number .* set segments=2"),
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
                found = schedule.generate("kfkb", pp=pp, micro_batches=groups * k, group_size=k)
                assert [[(a.kind, a.micro_batch) for a in actions] for actions in found.ranks] == expected
                assert found == fold(pp, 1, groups * k, k, "all")


def test_the_last_group_of_kfkb_is_smaller():
    """Ada-Grouper warms up k (pp - stage - 1) forwards; where k does not divide m, no group is larger than k."""
    made = schedule.generate("kfkb", pp=2, micro_batches=5, group_size=2)
    assert [a.text for a in made.ranks[0]] == ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0F4", "0B2", "0B3", "0B4"]
    assert [a.text for a in made.ranks[1]] == ["1F0", "1F1", "1B0", "1B1", "1F2", "1F3", "1B2", "1B3", "1F4", "1B4"]
    assert schedule.generate("kfkb", pp=3, micro_batches=4, group_size=9) == schedule.generate(
        "gpipe", pp=3, micro_batches=4
    )
    assert schedule.generate("kfkb", pp=3, micro_batches=6) == schedule.generate(
        "kfkb", pp=3, micro_batches=6, group_size=2
    )


def test_the_last_stage_but_one_of_the_shifted_critical_path_runs_one_forward_sooner():
    plain = schedule.generate("1f1b", pp=4, micro_batches=5)
    shifted = schedule.generate("shifted_critical_path", pp=4, micro_batches=5)
    assert [a.text for a in shifted.ranks[2]] == ["2F0", "2F1", "2F2", "2B0", "2B1", "2F3", "2B2", "2F4", "2B3", "2B4"]
    assert all(shifted.ranks[stage] == plain.ranks[stage] for stage in (0, 1, 3))
    for pp, m in ((1, 5), (4, 2)):
        again = schedule.generate("shifted_critical_path", pp=pp, micro_batches=m)
        assert again == schedule.generate("1f1b", pp=pp, micro_batches=m)


def test_the_second_segment_of_zb_v_runs_back():
    made = schedule.generate("zb_v", pp=3, segments=2, micro_batches=2)
    assert made.style == "v"
    assert [sorted({action.chunk for action in actions}) for actions in made.ranks] == [[0, 5], [1, 4], [2, 3]]
    assert schedule.style_of("zb_v") == "v" and schedule.style_of("aiao") == schedule.style_of("auto") == "loop"
    assert schedule.only_segments("zb_v") == 2 and schedule.only_segments("1f1b") == 1
    assert schedule.only_segments("fold") is None
    evaluation = schedule.forward_only(3, 2, 1, "v")
    schedule.validate(evaluation, forward_only=True)
    texts = [[a.text for a in actions] for actions in evaluation.ranks]
    assert texts == [["0F0", "5F0"], ["1F0", "4F0"], ["2F0", "3F0"]]


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
