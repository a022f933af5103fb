"""Which schedules the tests of this folder go through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from fold3d import schedule
from fold3d.schedule import Action, Kind, Schedule

SIZES = {"pp": range(1, 9), "segments": range(1, 5), "micro_batches": range(1, 21)}


def variants(pp: int, segments: int, micro_batches: int) -> Iterator[dict[str, Any]]:
    """Arguments of generate() for every registered schedule at one size, with every N and turn where it has them."""
    for info in schedule.registry():
        if not info.allows(segments):
            continue
        arguments = {"name": info.name, "pp": pp, "segments": segments, "micro_batches": micro_batches}
        group_sizes = range(1, micro_batches + 1) if info.uses_group_size else [None]
        turns = ["all", "1f1b"] if info.uses_turn else [None]
        for group_size in group_sizes:
            for turn in turns:
                yield arguments | {"group_size": group_size, "turn": turn}


def sizes() -> Iterator[tuple[int, int, int]]:
    """Every (pp, segments, m) in SIZES."""
    for pp in SIZES["pp"]:
        for segments in SIZES["segments"]:
            for micro_batches in SIZES["micro_batches"]:
                yield pp, segments, micro_batches


@st.composite
def schedules(draw: st.DrawFn, max_pp: int = 6, max_micro_batches: int = 12) -> Schedule:
    """A compute-only schedule of any registered kind and size."""
    info = draw(st.sampled_from(schedule.registry()))
    micro_batches = draw(st.integers(1, max_micro_batches))
    return schedule.generate(
        info.name,
        pp=draw(st.integers(1, max_pp)),
        segments=draw(st.sampled_from([n for n in range(1, 5) if info.allows(n)])),
        micro_batches=micro_batches,
        group_size=draw(st.integers(1, micro_batches)) if info.uses_group_size else None,
        turn=draw(st.sampled_from(["all", "1f1b"])) if info.uses_turn else None,
    )


def with_ranks(original: Schedule, ranks: list[list[Action]]) -> Schedule:
    """The schedule with other lists."""
    return Schedule(original.pp, original.segments, original.micro_batches, ranks, original.style)


def is_split(made: Schedule) -> bool:
    """Whether its backwards are I and W; those of a registered schedule all are, or none."""
    return any(action.kind == Kind.BACKWARD_INPUT for actions in made.ranks for action in actions)


def split_backwards(original: Schedule) -> Schedule:
    """The schedule with every B as I, and the Ws of a rank after all of its other actions."""
    ranks = []
    for actions in original.ranks:
        backwards = [a for a in actions if a.kind == Kind.BACKWARD]
        inputs = [
            Action(a.chunk, Kind.BACKWARD_INPUT, a.micro_batch) if a.kind == Kind.BACKWARD else a for a in actions
        ]
        ranks.append(inputs + [Action(a.chunk, Kind.BACKWARD_WEIGHT, a.micro_batch) for a in backwards])
    return with_ranks(original, ranks)
