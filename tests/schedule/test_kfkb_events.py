"""Lengths of kFkB by an event simulation written by hand, against those of the simulator in C++, to the nanosecond.

Ada-Grouper, section 5.2: a stage runs its list in order, each result leaves at once, and a stage waits for what it
needs and not for what it sends. A card sends one message and receives one at a time; of messages that wait, the one
that was ready first goes first.
"""

from __future__ import annotations

import heapq
from itertools import count

import pytest

from fold3d import schedule
from fold3d._C import ClusterModel, simulate_step

FORWARD, BACKWARD = 1000, 2000  # ns
GRID = [
    (p, m, k, transfer)
    for p in (2, 3, 4, 8)
    for m in (8, 16, 32)
    for k in (1, 2, 3, 4, 6, 8, m)
    for transfer in (250, 500, 1000, 1600, 3000)
]
FEW = [(2, 8, 2, 500), (3, 8, 3, 1000), (4, 16, 1, 1600), (4, 16, 4, 1600), (8, 16, 2, 3000)]


def program(p: int, m: int, k: int, stage: int) -> list[tuple[str, int]]:
    """k (p - stage - 1) forwards, then k forwards and k backwards in turn, then the backwards that are left."""
    warm_up = min(k * (p - stage - 1), m)
    made = [("F", i) for i in range(warm_up)]
    forwards, backwards = warm_up, 0
    while backwards < m:
        for kind in ("F", "B"):
            for _ in range(k):
                if kind == "F" and forwards < m:
                    made.append(("F", forwards))
                    forwards += 1
                elif kind == "B" and backwards < m:
                    made.append(("B", backwards))
                    backwards += 1
    return made


def length(p: int, m: int, k: int, transfer: int) -> int:
    """Returns the nanoseconds of a step."""
    programs = [program(p, m, k, stage) for stage in range(p)]
    there: list[set[tuple[str, int]]] = [set() for _ in range(p)]  # inputs and gradients that have arrived
    next_action, computes = [0] * p, [False] * p
    sends, receives = [False] * p, [False] * p
    waiting: list[tuple[int, int, tuple[str, int]]] = []  # sender, receiver, what; in the order of becoming ready
    events: list[tuple[int, int, str, tuple[int, ...], tuple[str, int]]] = []
    number = count()

    def push(time: int, what: str, stages: tuple[int, ...], action: tuple[str, int]) -> None:
        heapq.heappush(events, (time, next(number), what, stages, action))

    def compute(now: int, stage: int) -> None:
        if computes[stage] or next_action[stage] == len(programs[stage]):
            return
        kind, _ = action = programs[stage][next_action[stage]]
        comes_from_outside = stage > 0 if kind == "F" else stage < p - 1
        if comes_from_outside and action not in there[stage]:
            return
        computes[stage] = True
        push(now + (FORWARD if kind == "F" else BACKWARD), "computed", (stage,), action)

    def send(now: int) -> None:
        for message in list(waiting):
            sender, receiver, action = message
            if not sends[sender] and not receives[receiver]:
                sends[sender] = receives[receiver] = True
                waiting.remove(message)
                push(now + transfer, "sent", (sender, receiver), action)

    for stage in range(p):
        compute(0, stage)
    now = 0
    while events:
        now, _, what, stages, action = heapq.heappop(events)
        if what == "computed":
            (stage,) = stages
            computes[stage] = False
            next_action[stage] += 1
            receiver = stage + 1 if action[0] == "F" else stage - 1
            if 0 <= receiver < p:
                waiting.append((stage, receiver, action))
                send(now)
            compute(now, stage)
        elif what == "sent":
            sender, receiver = stages
            sends[sender] = receives[receiver] = False
            push(now, "arrived", (receiver,), action)
            send(now)
        else:
            there[stages[0]].add(action)
            compute(now, stages[0])
    assert all(done == len(made) for done, made in zip(next_action, programs, strict=True))
    return now


def simulated(p: int, m: int, k: int, transfer: int) -> int:
    """Returns the same by the simulator."""
    made = schedule.generate("kfkb", pp=p, micro_batches=m, group_size=k)
    model = ClusterModel()
    model.forward_ns, model.backward_ns = [FORWARD] * p, [BACKWARD] * p
    model.activation_bytes = [transfer] * p
    model.bandwidth = 1e9  # a byte a nanosecond
    model.layers, model.gradient_bytes = [1] * p, [0] * p
    # With zero1 no rank begins a step before all have ended the one before.
    return simulate_step(schedule.lower(made, reduce=False), model, 8, False).step_ns


@pytest.mark.parametrize("p, m, k, transfer", FEW)
def test_lengths(p: int, m: int, k: int, transfer: int) -> None:
    assert simulated(p, m, k, transfer) == length(p, m, k, transfer)


@pytest.mark.full
@pytest.mark.parametrize("p, m, k, transfer", [case for case in GRID if case not in FEW])
def test_all_lengths(p: int, m: int, k: int, transfer: int) -> None:
    assert simulated(p, m, k, transfer) == length(p, m, k, transfer)


def test_slow_transfers_want_groups_and_fast_ones_do_not() -> None:
    """The length of the event simulation itself: what Ada-Grouper gains, and that it is never free."""
    for p in (2, 4):
        lengths = {k: length(p, 16, k, FORWARD) for k in (1, 2, 4)}
        assert lengths[2] < 0.85 * lengths[1]
        assert length(p, 16, 1, 0) <= min(length(p, 16, k, 0) for k in (2, 4))
