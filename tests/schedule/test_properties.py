"""What holds for every schedule of the registry, whatever its size."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fold3d import schedule
from fold3d.errors import ConfigError
from fold3d.schedule import Action, Kind, Schedule
from fold3d.topology import chunks_of, stage_of
from tests.schedule.cases import is_split, schedules, sizes, split_backwards, variants, with_ranks

EXAMPLES = settings(max_examples=60)


@EXAMPLES
@given(schedules())
def test_every_action_occurs_exactly_once_on_its_rank(compute: Schedule):
    backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if is_split(compute) else (Kind.BACKWARD,)
    for stage, actions in enumerate(compute.ranks):
        expected = [
            Action(chunk, kind, micro_batch)
            for chunk in chunks_of(stage, compute.pp * compute.segments, compute.pp, compute.style)
            for kind in (Kind.FORWARD, *backward)
            for micro_batch in range(compute.micro_batches)
        ]
        assert Counter(actions) == Counter(expected)


@EXAMPLES
@given(schedules(), st.booleans())
def test_text_round_trip(compute: Schedule, lowered: bool):
    written = schedule.lower(compute, reduce=True) if lowered else compute
    assert schedule.parse_csv(written.csv()) == written
    assert schedule.parse_csv(written.csv()).csv() == written.csv()


def test_no_deadlock_at_any_size():
    """lower() validates its input, validate() proves its result free of deadlock under rendezvous."""
    for pp, segments, m in sizes():
        for arguments in variants(pp, segments, m):
            if arguments["group_size"] not in (None, 1, 2, pp - 1, pp, m - 1):
                continue
            schedule.validate(schedule.lower(schedule.generate(**arguments), reduce=True))


def blocking_run_ends(lowered: Schedule) -> bool:
    """An independent oracle: ranks walk their lists, SEND and RECV block until both ends stand at the same message."""
    position = [0] * lowered.pp
    ranks = [[a.text for a in actions] for actions in lowered.ranks]
    while True:
        moved = False
        for rank in range(lowered.pp):
            while position[rank] < len(ranks[rank]):
                action = lowered.ranks[rank][position[rank]]
                if action.kind.text.startswith("RECV"):
                    break  # its sender moves it on
                if action.kind.text.startswith("SEND"):
                    step = 1 if action.kind == Kind.SEND_FORWARD else -1
                    peer = stage_of(action.chunk + step, lowered.pp, lowered.style)
                    awaited = f"{action.chunk + step}{action.kind.text.replace('SEND', 'RECV')}{action.micro_batch}"
                    if position[peer] == len(ranks[peer]) or ranks[peer][position[peer]] != awaited:
                        break
                    position[peer] += 1
                position[rank] += 1
                moved = True
        if not moved:
            return all(position[rank] == len(ranks[rank]) for rank in range(lowered.pp))


@EXAMPLES
@given(schedules(), st.booleans())
def test_an_independent_rendezvous_machine_ends(compute: Schedule, split: bool):
    lowered = schedule.lower(split_backwards(compute) if split else compute, reduce=True)
    assert blocking_run_ends(lowered)


@EXAMPLES
@given(schedules())
def test_receives_come_in_the_order_of_the_sends(compute: Schedule):
    lowered = schedule.lower(compute, reduce=False)
    for step, send, recv in ((1, Kind.SEND_FORWARD, Kind.RECV_FORWARD), (-1, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)):
        for stage, peer in product(range(lowered.pp), repeat=2):
            sent = [(a.chunk + step, a.micro_batch) for a in lowered.ranks[stage] if a.kind == send]
            sent = [(chunk, i) for chunk, i in sent if stage_of(chunk, lowered.pp, lowered.style) == peer]
            received = [(a.chunk, a.micro_batch) for a in lowered.ranks[peer] if a.kind == recv]
            received = [(c, i) for c, i in received if stage_of(c - step, lowered.pp, lowered.style) == stage]
            assert sent == received


@EXAMPLES
@given(schedules())
def test_lowering_only_adds(compute: Schedule):
    """Compute order stays; each SEND follows its producer, each REDUCE_GRAD the last backward of its chunk."""
    lowered = schedule.lower(compute, reduce=True)
    input_gradient = Kind.BACKWARD_INPUT if is_split(compute) else Kind.BACKWARD
    for before, after in zip(compute.ranks, lowered.ranks, strict=True):
        assert [a for a in after if a.kind.is_compute] == before
        reduced = [a.chunk for a in after if a.kind == Kind.REDUCE]
        assert Counter(reduced) == Counter({a.chunk for a in before})
        for i, action in enumerate(after):
            if action.kind == Kind.SEND_FORWARD:
                assert after[i - 1] == Action(action.chunk, Kind.FORWARD, action.micro_batch)
            if action.kind == Kind.SEND_BACKWARD:
                assert after[i - 1] == Action(action.chunk, input_gradient, action.micro_batch)
            if action.kind == Kind.REDUCE:
                tail = [a for a in after[i:] if a.kind.is_compute]
                assert all(a.chunk != action.chunk for a in tail)
    assert not any(a.kind == Kind.REDUCE for rank in schedule.lower(compute, reduce=False).ranks for a in rank)


@EXAMPLES
@given(schedules(), st.booleans(), st.data())
def test_a_dropped_action_is_rejected(compute: Schedule, lowered: bool, data: st.DataObject):
    whole = schedule.lower(compute, reduce=True) if lowered else compute
    ranks = whole.ranks
    rank = data.draw(st.integers(0, whole.pp - 1))
    dropped = ranks[rank].pop(data.draw(st.integers(0, len(ranks[rank]) - 1)))
    if dropped.kind == Kind.REDUCE and whole.pp * whole.segments == 1:
        return  # the only REDUCE_GRAD: what is left is the same schedule without DP.sync
    with pytest.raises(ConfigError, match="is missing"):
        schedule.validate(with_ranks(whole, ranks))


@EXAMPLES
@given(schedules(), st.booleans(), st.data())
def test_a_duplicated_action_is_rejected(compute: Schedule, lowered: bool, data: st.DataObject):
    whole = schedule.lower(compute, reduce=True) if lowered else compute
    ranks = whole.ranks
    actions = ranks[data.draw(st.integers(0, whole.pp - 1))]
    twice = actions[data.draw(st.integers(0, len(actions) - 1))]
    actions.insert(data.draw(st.integers(0, len(actions))), twice)
    with pytest.raises(ConfigError, match=f"{twice.text} on rank . occurs twice"):
        schedule.validate(with_ranks(whole, ranks))


@EXAMPLES
@given(schedules(), st.booleans(), st.data())
def test_a_swap_that_breaks_a_dependency_is_rejected(compute: Schedule, lowered: bool, data: st.DataObject):
    """Two actions of a rank change places, one of which waits for the other, directly or through other ranks."""
    whole = schedule.lower(compute, reduce=True) if lowered else compute
    ranks = whole.ranks
    actions = ranks[data.draw(st.integers(0, whole.pp - 1))]
    later = data.draw(st.integers(0, len(actions) - 1))
    needed = schedule.waits_for(whole, actions[later])
    earlier = [i for i, action in enumerate(actions) if action in needed]
    if not earlier:
        return
    first = data.draw(st.sampled_from(earlier))
    actions[first], actions[later] = actions[later], actions[first]
    with pytest.raises(ConfigError, match=r"which it waits for|deadlock"):
        schedule.validate(with_ranks(whole, ranks))


@EXAMPLES
@given(schedules(), st.booleans(), st.data())
def test_a_swap_passes_only_if_the_machine_still_ends(compute: Schedule, lowered: bool, data: st.DataObject):
    """Two neighbours of a rank change places: validate() accepts what an independent run ends with, and no more."""
    whole = schedule.lower(compute, reduce=False) if lowered else compute
    ranks = whole.ranks
    actions = ranks[data.draw(st.integers(0, whole.pp - 1))]
    if len(actions) < 2:
        return
    i = data.draw(st.integers(0, len(actions) - 2))
    actions[i], actions[i + 1] = actions[i + 1], actions[i]
    swapped = with_ranks(whole, ranks)
    in_order = all(
        needed in list_[:position] or needed not in list_
        for list_ in swapped.ranks
        for position, action in enumerate(list_)
        for needed in schedule.waits_for(swapped, action)
    )
    if lowered:
        fine = in_order and blocking_run_ends(swapped)
    else:
        fine = in_order and _compute_run_ends(swapped)
    if fine:
        schedule.validate(swapped)
    else:
        with pytest.raises(ConfigError):
            schedule.validate(swapped)


def _compute_run_ends(compute: Schedule) -> bool:
    done: set[Action] = set()
    position = [0] * compute.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(compute.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if not all(needed in done for needed in schedule.waits_for(compute, action)):
                    break
                done.add(action)
                position[rank] += 1
                moved = True
    return len(done) == sum(len(actions) for actions in compute.ranks)
