"""Closed-form lengths of the papers, in units of one chunk's forward F and backward B."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fold3d import schedule
from fold3d.schedule import Schedule
from tests.schedule.cases import is_split, schedules, sizes

F, B = 1.0, 2.0


def length(name: str, pp: int, segments: int, m: int, *, send: float = 0.0, **options) -> float:
    made = schedule.generate(name, pp=pp, segments=segments, micro_batches=m, **options)
    return schedule.unit_timeline(made, forward=F, backward=B, send=send).makespan


def test_gpipe_and_1f1b_take_m_plus_p_minus_1_rounds():
    """GPipe and PipeDream-Flush: (m + p - 1)(F + B)."""
    for pp, segments, m in sizes():
        if segments == 1:
            assert length("gpipe", pp, 1, m) == (m + pp - 1) * (F + B)
            assert length("1f1b", pp, 1, m) == (m + pp - 1) * (F + B)


def test_interleaving_divides_the_bubble_by_the_segments():
    """Narayanan et al. 2021, section 2.2: bubble (p - 1) / (segments m), where p divides m."""
    for pp, segments, m in sizes():
        made = schedule.generate("interleaved", pp=pp, segments=segments, micro_batches=m)
        if m % pp == 0:
            assert schedule.unit_timeline(made).bubble == pytest.approx((pp - 1) / (segments * m))
        elif m > pp:
            assert schedule.unit_timeline(made).makespan == (segments * m + pp - 1) * (F + B)


def test_zb_h1_leaves_f_plus_i_minus_w_of_each_bubble():
    """Qi et al. 2023, table 1: of 1F1B's (p - 1)(F + I + W) ZB-H1 leaves (p - 1)(F + I - W); here I = W = B / 2."""
    for pp, segments, m in sizes():
        if segments > 1:
            continue
        split = length("zb_h1", pp, 1, m)
        if m >= pp:
            assert split == m * (F + B) + (pp - 1) * F
        assert split <= length("1f1b", pp, 1, m) and (split < length("1f1b", pp, 1, m)) == (pp > 1)
    assert length("1f1b", 4, 1, 8) / length("zb_h1", 4, 1, 8) == 33 / 27


def test_zb_v_never_waits_once_it_has_begun():
    """Qi et al. 2024, section 6: no bubble where F = I = W; stage s begins when the first micro-batch reaches it."""
    for pp, _, m in sizes():
        made = schedule.generate("zb_v", pp=pp, segments=2, micro_batches=m)
        timeline = schedule.unit_timeline(made, forward=1, backward=2)
        if m >= 2 * pp - 1:
            assert timeline.makespan == 6 * m + pp - 1
            assert all(spans[-1].end - spans[0].start == 6 * m for spans in timeline.ranks)
        # Of 1F1B, whose stages are twice as large and whose backward is whole.
        assert timeline.makespan <= 6 * (m + pp - 1)


def test_shifted_critical_path_leaves_3_f_of_all_stages_but_two():
    """Merak, section 5.1, B = 2 F: bubble (p - 1) 4 F of 1F1B, (p - 1) 3 F with early recomputation, (p - 2) 3 F.

    1F1B's last stage computes nothing again here, which is one of Merak's two steps: a forward is what is left to gain.
    """
    for pp in range(2, 9):
        for m in range(3, 21):
            found = {}
            for name in ("1f1b", "shifted_critical_path"):
                made = schedule.generate(name, pp=pp, micro_batches=m)
                again = schedule.lower(made, reduce=False, recompute=[True] * pp)
                found[name] = schedule.unit_timeline(again, forward=F, backward=B).makespan
            assert found == {"1f1b": 4 * m + 3 * (pp - 2) + F, "shifted_critical_path": 4 * m + 3 * (pp - 2)}


@pytest.mark.parametrize("turn", ["all", "1f1b"])
def test_aiao_bubble(turn: str):
    """Fold3D equation 3: bubble (p - 1) Tcomp / (ns ms); with m < p each fold also waits for its first micro-batch."""
    for pp, segments, m in sizes():
        made = schedule.generate("fold", pp=pp, segments=segments, micro_batches=m, group_size=m, turn=turn)
        if m >= pp:
            assert schedule.unit_timeline(made).bubble == pytest.approx((pp - 1) / (segments * m))
        rounds = (segments - 1) * max(m, pp) + m + pp - 1
        assert schedule.unit_timeline(made, forward=F, backward=B).makespan == rounds * (F + B)


def test_kfkb_is_shorter_on_a_slow_network_and_never_free():
    """Ada-Grouper section 4.1, figure 2 (B = 2 F, transfers of F/2): k = 2 beats 1F1B.

    Without transfers no k beats k = 1 (1F1B) and k = m (GPipe).
    """
    for pp in (2, 4, 8):
        m = 2 * pp
        slow = {k: length("kfkb", pp, 1, m, send=F / 2, group_size=k) for k in (1, 2)}
        assert slow[2] < slow[1]
        for k in range(1, m + 1):
            free = length("kfkb", pp, 1, m, group_size=k)
            assert free >= (m + pp - 1) * (F + B)
            if k in (1, m):
                assert free == (m + pp - 1) * (F + B)


@settings(max_examples=60)
@given(schedules(), st.floats(0.25, 4), st.floats(0.25, 4), st.floats(0, 4))
def test_bounds(made: Schedule, forward: float, backward: float, send: float):
    """Nothing is shorter than a rank's work plus what must come before and after it."""
    timeline = schedule.unit_timeline(made, forward=forward, backward=backward, send=send)
    work = made.segments * made.micro_batches * (forward + backward)
    # The last stage begins so late; of a split backward, something else may be left to do while the gradient comes.
    hops = (made.pp - 1) * (forward + send + (0 if is_split(made) else backward + send))
    tolerance = 1e-9 * timeline.makespan
    assert timeline.makespan >= work + hops - tolerance
    assert timeline.busy == pytest.approx(work)
    for spans, actions in zip(timeline.ranks, made.ranks, strict=True):
        assert [span.action for span in spans] == actions
        assert all(a.end <= b.start + tolerance for a, b in pairwise(spans))


def test_split_backward_costs_half_each():
    made = schedule.parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    schedule.validate(made)
    timeline = schedule.unit_timeline(made, forward=1, backward=4)
    assert [(s.action.text, s.start, s.end) for s in timeline.ranks[0]] == [
        ("0F0", 0, 1),
        ("0I0", 4, 6),
        ("0W0", 6, 8),
    ]
    assert timeline.makespan == 8


def test_lowered_schedules_take_as_long():
    made = schedule.generate("interleaved", pp=4, segments=2, micro_batches=6)
    lowered = schedule.lower(made, reduce=True)
    assert schedule.unit_timeline(lowered).makespan == schedule.unit_timeline(made).makespan


def test_a_schedule_that_stops_is_an_error():
    with pytest.raises(ValueError, match="0B0 on rank 0 waits for ever"):
        schedule.unit_timeline(schedule.parse_csv("0B0,0F0\n"))
