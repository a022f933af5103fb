"""What the validator says: the reason, and the grid with the offending cell marked."""

from __future__ import annotations

import pytest

from fold3d import schedule
from fold3d.errors import ConfigError
from tests.schedule.cases import with_ranks


def complaint(csv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        schedule.validate(schedule.parse_csv(csv))
    return str(caught.value)


def test_the_grid_marks_the_cell():
    assert complaint("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n") == (
        "invalid schedule (pp=2 segments=1 m=2): 1B1 on rank 1 comes before 1F1 (step 2), which it waits for\n"
        "step   rank 0 rank 1\n"
        "0      0F0    1F0\n"
        "1      0F1    >1B1<   <-- here, rank 1\n"
        "2      0B0    1F1\n"
        "3      0B1    1B0\n"
    )


@pytest.mark.parametrize(
    "csv, message, cell",
    [
        ("0F0,0B0,1F0\n1B0\n", "1F0 on rank 0: chunk 1 belongs to rank 1", ">1F0<"),
        ("0F0,0F0,0B0\n", "0F0 on rank 0 occurs twice, first in step 0", ">0F0<"),
        ("0F0,0F1,0B0\n", "0B1 on rank 0 is missing", ">missing<"),
        ("0F0,0B0,0B1\n", "0F1 on rank 0 is missing", ">0B1<"),
        ("0F0,0B0\n1F0,1I0\n", "1W0 on rank 1 is missing", ">missing<"),
        ("0F0,0I0,0W0,0B0\n", "0B0 on rank 0 does not go together with I and W", ">0B0<"),
        ("0F0,0B0,0W0\n", "0W0 on rank 0 does not go together with I and W", ">0W0<"),
        ("0F0,0W0,0I0\n", "0W0 on rank 0 comes before 0I0 (step 2)", ">0W0<"),
        ("0F0,0I0,0REDUCE_GRAD,0W0\n", "0REDUCE_GRAD on rank 0 comes before 0W0 (step 3)", ">0REDUCE_GRAD<"),
        ("0F0,0B0,0RECV_F0\n", "0RECV_F0 on rank 0 has no sender", ">0RECV_F0<"),
        ("0F0,0B0,0SEND_F0\n", "0SEND_F0 on rank 0 has no other end", ">0SEND_F0<"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n",
            "1RECV_F0 on rank 1 is missing",
            ">1F0<",
        ),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", "1REDUCE_GRAD on rank 1 is missing", ">missing<"),
        ("0F0,0REDUCE_GRAD,0B0\n", "0REDUCE_GRAD on rank 0 comes before 0B0 (step 2)", ">0REDUCE_GRAD<"),
    ],
)
def test_reasons(csv: str, message: str, cell: str):
    text = complaint(csv)
    assert message in text
    (row,) = [line for line in text.splitlines() if "<-- here" in line]
    assert cell in row


def test_a_deadlock_shows_its_cycle():
    """Both ranks send first: fine with buffers, a deadlock under rendezvous."""
    text = complaint(
        "0F0,0F1,0SEND_F0,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    assert "deadlock: 0RECV_B0 on rank 0 waits for 1SEND_B0 on rank 1; 1RECV_F1 on rank 1 waits for 0SEND_F1" in text
    assert ">0RECV_B0<" in text


def test_a_deadlock_across_compute_only_lists():
    text = complaint("2F0,0F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    assert "deadlock: 2F0 on rank 0 waits for 1F0 on rank 1; 1F0 on rank 1 waits for 0F0 on rank 0" in text


def test_long_schedules_show_the_rows_near_the_mark():
    made = schedule.generate("1f1b", pp=2, micro_batches=40)
    ranks = made.ranks
    ranks[0].insert(30, ranks[0][30])
    with pytest.raises(ConfigError) as caught:
        schedule.validate(with_ranks(made, ranks))
    assert len(str(caught.value).splitlines()) < 25
    assert "earlier steps)" in str(caught.value) and "later steps)" in str(caught.value)


@pytest.mark.parametrize("name", schedule.names())
def test_every_single_drop_and_duplicate_of_a_small_schedule(name: str):
    (info,) = [info for info in schedule.registry() if info.name == name]
    segments = 2 if info.uses_segments else 1
    compute = schedule.generate(name, pp=2, segments=segments, micro_batches=3)
    for whole in (compute, schedule.lower(compute, reduce=True)):
        for rank in range(2):
            for step in range(len(whole.ranks[rank])):
                for repeat in (0, 2):
                    ranks = whole.ranks
                    ranks[rank][step : step + 1] = [ranks[rank][step]] * repeat
                    with pytest.raises(ConfigError, match="occurs twice" if repeat else "is missing"):
                        schedule.validate(with_ranks(whole, ranks))


def test_shapes_must_fit():
    made = schedule.generate("gpipe", pp=2, micro_batches=2)
    with pytest.raises(ConfigError, match="lists for 2 ranks"):
        schedule.validate(schedule.Schedule(3, 1, 2, made.ranks))
    with pytest.raises(ConfigError, match=r"0F1 lies outside: chunks are 0\.\.1, micro-batches 0\.\.0"):
        schedule.validate(schedule.Schedule(2, 1, 1, made.ranks))


def test_forward_only():
    evaluation = schedule.forward_only(pp=2, segments=2, micro_batches=2)
    schedule.validate(evaluation, forward_only=True)
    schedule.validate(schedule.lower(evaluation, reduce=False), forward_only=True)
    with pytest.raises(ConfigError, match="0B0 on rank 0 is missing"):
        schedule.validate(evaluation)
    with pytest.raises(ConfigError, match="cannot reduce gradients in a schedule without backward"):
        schedule.lower(evaluation, reduce=True)
    training = schedule.generate("gpipe", pp=2, micro_batches=1)
    with pytest.raises(ConfigError, match="0B0 on rank 0 does not belong into a forward-only schedule"):
        schedule.validate(training, forward_only=True)


def test_lower_takes_compute_only():
    lowered = schedule.lower(schedule.generate("gpipe", pp=2, micro_batches=2), reduce=True)
    with pytest.raises(ConfigError, match="already has SEND or RECV"):
        schedule.lower(lowered, reduce=True)
