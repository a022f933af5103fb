"""Who holds up a step, from the plan and the ranks' reports; and the board that carries them, without processes."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch.distributed as dist

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.faults.diagnosis import holding_up
from fold3d.faults.failure import FailureBoard
from fold3d.faults.progress import Progress, Report
from fold3d.topology import Topology

RUN = 5


def report(action: str, run: int = RUN, *, closed: bool = False) -> Report:
    return Report(beat=1, run=run, micro_batches=4, action=action, doing="step 5", meets=False, closed=closed)


def arbiter(action: str, run: int = RUN) -> Report:
    """In front of a layer whose parameters have not arrived."""
    return Report(beat=1, run=run, micro_batches=4, action=action, doing="the gather", meets=True, closed=False)


def doing(what: str, run: int = RUN, *, meets: bool = False) -> Report:
    return Report(beat=1, run=run, micro_batches=4, action="", doing=what, meets=meets, closed=False)


def late(
    dp: int, pp: int, rank: int, places: list[str | Report], name: str = "1f1b", segments: int = 1, tp: int = 1
) -> list[int]:
    plain = schedules.generate(name, pp=pp, segments=segments, micro_batches=4)
    reports = {r: place if isinstance(place, Report) else report(place) for r, place in enumerate(places)}
    topology = Topology(dp=dp, pp=pp, tp=tp, rank=rank)
    return holding_up(schedules.lower(plain, reduce=dp > 1), topology, RUN, reports)


NOT_BEGUN = doing("", RUN - 1)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_chain_ends_at_the_rank_that_never_began(rank: int) -> None:
    assert late(1, 4, rank, ["0B0", "1B0", "2B0", NOT_BEGUN]) == [3]


def test_a_forward_that_does_not_end() -> None:
    assert late(1, 4, 3, ["0B0", "1F2", "2F1", "3F0"]) == [], "stage 3 itself computes"
    assert late(1, 4, 3, ["0F0", "1F0", "2F0", "3F0"]) == [0]


def test_a_backward_that_does_not_end() -> None:
    assert late(1, 4, 0, ["0B0", "1B0", "2B0", "3B0"]) == [3]


def test_a_message_that_does_not_leave() -> None:
    """Its sender has computed, and hangs in sending: whoever waits for the message waits for it."""
    assert late(1, 4, 2, ["0F3", "1SEND_F1", "2F1", "3F1"]) == [1]
    assert late(1, 4, 1, ["0B0", "1B0", "2SEND_B0", "3B3"]) == [2]


def test_folded() -> None:
    """Stage 0 waits in its second segment for stage 1, which hangs in its first."""
    assert late(1, 2, 0, ["2F1", "1F1"], "aiao", 2) == [1]


def test_the_other_replica_is_late() -> None:
    """Rank 1 has computed everything and waits for a sum; rank 3 waits for rank 2, which hangs in a forward."""
    sums = doing("the gradient sums", meets=True)
    assert late(2, 2, 1, [sums, sums, "0F2", "1F2"]) == [2]


def test_the_chain_goes_through_collectives() -> None:
    """Rank 0 sleeps in its optimizer, rank 2 waits for it with the loss, rank 3 for rank 2 in the next run."""
    places: list[str | Report] = [doing("the optimizer", RUN - 1), "1F0", doing("the loss", RUN - 1, meets=True), "1F0"]
    assert late(2, 2, 3, places) == [0]
    assert late(2, 2, 1, places) == [0]
    met = doing("the norm", meets=True)
    assert late(1, 4, 0, [met, met, met, doing("")]) == [3]
    assert late(1, 4, 0, [met, met, met, met]) == []
    compared = doing("comparing what callbacks want of the training", meets=True)
    for rank in (0, 1, 2):  # rank 0 meets rank 3 by way of others only
        assert late(2, 2, rank, [compared, compared, compared, doing("training")]) == [3]


def test_the_chain_goes_through_gates() -> None:
    """Rank 0 waits for parameters of rank 2, which has not stepped; rank 1 for activations of rank 0."""
    stuck = doing("the optimizer", RUN - 1)
    assert late(2, 2, 0, [arbiter("0F0"), "1F0", stuck, "1F0"]) == [2]
    assert late(2, 2, 1, [arbiter("0F0"), "1F0", stuck, "1F0"]) == [2]
    assert late(2, 2, 3, ["0F1", "1F0", "0F1", arbiter("1F0")]) == [1], "it computes"


def test_the_chain_goes_through_shards() -> None:
    """Ranks 2 and 3 are the shards of stage 1: one computes, or sleeps, while the other waits for it in a layer."""
    assert late(1, 2, 2, ["0B0", "0B0", "1B0", "1F0"], tp=2) == [3]
    assert late(1, 2, 0, ["0B0", "0B0", "1B0", "1F0"], tp=2) == [3], "its stage 1 is rank 2, which waits for rank 3"
    assert late(1, 2, 1, ["0B0", "0B0", "1B0", "1F0"], tp=2) == [3]
    assert late(1, 2, 1, ["0F2", "0F1", "1F0", "1F0"], tp=2) == []
    assert late(1, 1, 0, ["0F2", NOT_BEGUN], tp=2) == [1]


def test_whoever_has_left_is_late() -> None:
    assert late(1, 2, 0, ["0B0", report("", RUN - 2, closed=True)]) == [1]
    assert late(1, 2, 0, ["0B0", report("", RUN)]) == [], "it has finished the run: not its fault"


def test_nobody_is_blamed_without_a_report() -> None:
    plain = schedules.lower(schedules.generate("1f1b", pp=2, micro_batches=4), reduce=False)
    assert holding_up(plain, Topology(dp=1, pp=2, rank=0), RUN, {0: report("0B0")}) == []


def test_reports_travel_as_text() -> None:
    one = report("2F1")
    assert Report.parse(f"1 {one.text()}".encode()) == one and one.where() == "in 2F1 of step 5"
    assert "ended after 5 runs" in report("", closed=True).where()


class Executor:
    """Stands where the C++ executor stands."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def current_action(self) -> str:
        return "0F0"

    def abort(self, message: str) -> None:
        self.aborted.append(message)


def boards(count: int, timeout: float, store: Any = None) -> list[tuple[FailureBoard, Executor]]:
    store = store or dist.HashStore()
    made = []
    for rank in range(count):
        progress, executor = Progress(), Executor()
        progress.follow(executor)
        progress.life.end_with(executor)
        topology = Topology(dp=1, pp=count, rank=rank)
        made.append((FailureBoard(store, "test", topology, timeout, progress), executor))
    return made


def test_the_first_failure_wins() -> None:
    made = boards(3, 60.0)
    assert made[1][0].publish("first") == "first" and made[2][0].publish("second") == "first"
    assert made[0][0].cause(5.0) == "first"
    assert [executor.aborted for _, executor in made] == [["first"]] * 3
    for board, _ in made:
        board.close()


def test_silence_is_noticed_by_the_rank_before() -> None:
    made = boards(3, 1.5)
    made[2][0]._heart.close("")
    message = made[0][0].cause(60.0)
    assert message is not None
    assert message.startswith("rank 2 (replica 0, stage 2) has given no sign of life for ") and "0F0" in message
    assert "Noticed by rank 1" in message
    for board, _ in made:
        board.close()


def test_leaving_in_good_order_is_no_silence() -> None:
    """The rank before the one that left watches the next one instead."""
    made = boards(3, 1.0)
    made[1][0].close()
    assert made[0][0].cause(2.5) is None
    assert made[0][0].reports([0, 1, 2])[1].closed
    assert made[0][0]._watched == 2
    for board, _ in made:
        board.close()


def test_a_rank_that_has_not_come_yet_is_not_silent() -> None:
    """Whoever waits for it knows for how long."""
    board = FailureBoard(dist.HashStore(), "test", Topology(dp=1, pp=2, rank=0), 0.5, Progress())
    assert board.cause(2.0) is None
    board.close()


def test_a_rank_that_holds_the_gil_is_not_silent() -> None:
    store = dist.HashStore()
    heart = _C.Heartbeat(store, "rank", 0.02, "text")
    grown = 0
    for _ in range(100):
        before = int(store.get("rank").partition(b" ")[0])
        ctypes.PyDLL(None).usleep(200_000)
        grown = max(grown, int(store.get("rank").partition(b" ")[0]) - before)
        if grown > 2:
            break
    heart.close("the end")
    assert grown > 2 and store.get("rank").endswith(b" the end")


class Wrapped(dist.Store):
    """A store that lies behind another object."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dist.HashStore()

    def ask(self, name: str, *args: Any) -> Any:
        return getattr(self.store, name)(*args)

    def check(self, keys: list[str]) -> Any:
        return self.ask("check", keys)

    def get(self, key: str) -> Any:
        return self.ask("get", key)

    def multi_get(self, keys: list[str]) -> Any:
        return self.ask("multi_get", keys)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        return self.ask("compare_set", key, expected, value)

    def add(self, key: str, value: int) -> Any:
        return self.ask("add", key, value)


class Deaf(Wrapped):
    """A store that stops answering."""

    deaf = False

    def ask(self, name: str, *args: Any) -> Any:
        while self.deaf:
            time.sleep(0.05)
        return super().ask(name, *args)


def test_a_store_that_does_not_answer() -> None:
    store = Deaf()
    (_, _), (board, executor) = made = boards(2, 1.0, store)
    store.deaf = True
    message = board.cause(10.0)
    assert message is not None and "rank 0 (replica 0, stage 0), which keeps it, is stopped" in message
    assert executor.aborted == [message]
    start = time.monotonic()
    assert board.publish("my own") == message and board.reports([0]) == {}
    assert time.monotonic() - start < 30
    store.deaf = False
    for one, _ in made:
        one.close()


class Slow(Wrapped):
    """A store whose answers come later than a client waits for them."""

    refused = 0
    slow = False

    def ask(self, name: str, *args: Any) -> Any:
        if self.slow:
            self.refused += 1
            raise dist.DistStoreError("wait timeout after 3000ms")
        return super().ask(name, *args)


def test_a_store_that_answers_late_has_not_ended() -> None:
    store = Slow()
    (_, _), (board, executor) = made = boards(2, 60.0, store)
    with board._progress.during("a step"):
        store.slow = True
        assert board.cause(4.0) is None and store.refused >= 2
        store.slow = False
    assert board.publish("my own") == "my own" and executor.aborted == ["my own"]
    for one, _ in made:
        one.close()
