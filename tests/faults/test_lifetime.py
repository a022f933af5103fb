"""Lifetime and Supervisor: who says that a rank may go on, and what it raises when it may not."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from fold3d.errors import ConfigError, RankError
from fold3d.faults.lifetime import Lifetime
from fold3d.faults.supervisor import Supervisor
from fold3d.topology import Topology


class Part:
    """What communicates."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def abort(self, reason: str) -> None:
        self.told.append(reason)


def test_the_first_failure_ends_all_that_communicates() -> None:
    life, parts = Lifetime(), [Part() for _ in range(3)]
    life.end_with(parts[0])
    life.end_with(parts[1])
    life.forget(parts[1])
    assert life.failure is None and life.fail("first") and not life.fail("second")
    life.end_with(parts[2])  # too late to begin anything
    assert life.failure == "first"
    assert [part.told for part in parts] == [["first"], [], ["first"]]


def test_of_many_threads_one_is_first() -> None:
    life, part = Lifetime(), Part()
    life.end_with(part)
    start = threading.Barrier(8)
    firsts: list[str] = []

    def fail(number: int) -> None:
        start.wait(10.0)
        if life.fail(str(number)):
            firsts.append(str(number))

    threads = [threading.Thread(target=fail, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert firsts == [life.failure] == part.told


def test_ending() -> None:
    life, part = Lifetime(), Part()
    with pytest.raises(ZeroDivisionError), life.ending(part):
        raise ZeroDivisionError("own")
    assert part.told == ["own"]
    life.fail("later")
    assert part.told == ["own"], "it is over"


def test_what_a_life_that_ended_says() -> None:
    life = Lifetime()
    life.check()
    life.fail("rank 1 failed")
    life.check()  # not raised here yet: what the rank does next raises it
    life.raised()
    with pytest.raises(RankError, match="stopped at an earlier failure: rank 1 failed"):
        life.check()
    closed = Lifetime()
    closed.close()
    with pytest.raises(ConfigError, match="this engine is closed"):
        closed.check()


def test_a_rank_that_is_alone_goes_on_after_a_failure() -> None:
    supervisor = Supervisor(Topology(dp=1, pp=1, rank=0))
    supervisor.open()
    for _ in range(2):
        message = r"rank 0 .* failed in step 3: ZeroDivisionError: one"
        with pytest.raises(RankError, match=message), supervisor.together("step 3"):
            raise ZeroDivisionError("one")
        supervisor.progress.life.check()


def test_what_runs_on_one_rank_fails_on_all() -> None:
    store = dist.HashStore()
    ranks = [Supervisor(Topology(dp=2, pp=1, rank=rank)) for rank in range(2)]
    parts = [Part(), Part()]
    for supervisor, part in zip(ranks, parts, strict=True):
        supervisor.progress.life.end_with(part)
        supervisor.watch(store, "job", 30.0)
        supervisor.open()
    with pytest.raises(RankError, match=r"rank 0 .*ValueError: bad sample") as own, ranks[0].together("step 1"):
        raise ValueError("bad sample")
    deadline = threading.Event()
    for _ in range(100):
        if ranks[1].progress.life.failure is not None:
            break
        deadline.wait(0.1)
    with pytest.raises(RankError) as others, ranks[1].together("step 1"):
        pytest.fail("the body does not begin")
    assert str(own.value) == str(others.value) and [part.told for part in parts] == [[str(own.value)]] * 2
    for supervisor in ranks:
        with pytest.raises(RankError, match="earlier failure"):
            supervisor.progress.life.check()
        supervisor.close()


def test_an_engine_that_is_closed_in_the_middle_tells_nobody() -> None:
    supervisor = Supervisor(Topology(dp=1, pp=1, rank=0))
    supervisor.open()
    with pytest.raises(ConfigError, match="closed in the middle of step 1"), supervisor.together("step 1"):
        supervisor.progress.life.close()
        raise RuntimeError("the executor is closed")
