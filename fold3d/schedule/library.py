"""The registered schedules and what can be done to any schedule; errors become ConfigError."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.schedule.files import load_csv
from fold3d.topology import LOOP, chunks_of

_MOST_FORWARDS = 10**7  # of all ranks; a step of hours, and gigabytes of actions


@contextmanager
def _config_errors() -> Iterator[None]:
    """Turns the ValueError of the C++ part into ConfigError, which the package raises for bad settings."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def registry() -> list[_C.SchedulerInfo]:
    """Returns every schedule with its name, help text and which parameters it uses."""
    return _C.registry()


def names() -> list[str]:
    """Returns the names `generate` accepts."""
    return [info.name for info in _C.registry()]


def only_segments(name: str) -> int | None:
    """Returns the one number of segments that a registered schedule can have, None where any will do; 1 for a name that
    nobody knows."""
    return next((info.segments or (None if info.uses_segments else 1) for info in registry() if info.name == name), 1)


def style_of(name: str) -> str:
    """Returns on which stages the chunks of a schedule live, "loop" or "v".

    Args:
        name: of a schedule, or path of a CSV file; what is neither is "loop".
    Raises: ConfigError if the file cannot be read.
    """
    if name.endswith(".csv"):
        return load_csv(name).style
    return next((info.style for info in registry() if info.name == name), LOOP)


def generate(
    name: str,
    *,
    pp: int,
    segments: int = 1,
    micro_batches: int,
    group_size: int | None = None,
    turn: str | None = None,
) -> _C.Schedule:
    """Returns the compute-only schedule `name`: for every stage the ordered F and B actions of one step.

    Args:
        name: one of `names()`.
        pp: stages.
        segments: consecutive parts of the model, each of pp chunks. On which stage they live is the schedule's `style`.
        micro_batches: m per step and pipeline; any number, also fewer than pp.
        group_size: N, micro-batches that pass a segment before the next starts; None is the default.
        turn: "all" or "1f1b", how the last segment turns around; None is the default.
    Raises: ConfigError for an unknown name, a size below 1 or a parameter that the schedule does not use.
    """
    check_group_size(group_size)
    if pp * segments * micro_batches > _MOST_FORWARDS and min(pp, segments, micro_batches) > 0:
        raise ConfigError(
            f"pp={pp} segments={segments} micro_batches={micro_batches}: more than {_MOST_FORWARDS:.0e} forwards in "
            "one step; lower micro_batches"
        )
    with _config_errors():
        return _C.generate(name, pp, segments, micro_batches, group_size or 0, turn or "")


def check_group_size(group_size: int | None) -> None:
    """Raises ConfigError for a number that N cannot be; None is a schedule's default."""
    if group_size is not None and group_size < 1:
        raise ConfigError(f"group_size must be at least 1, got {group_size}; leave it out for the default")
    if group_size is not None and group_size > _MOST_FORWARDS:
        raise ConfigError(f"group_size={group_size} is more than {_MOST_FORWARDS:.0e}; lower it to micro_batches")


def forward_only(pp: int, segments: int, micro_batches: int = 1, style: str = LOOP) -> _C.Schedule:
    """Returns the schedule of evaluation: every chunk's forward, segment by segment, and no backward."""
    ranks = [
        [
            _C.Action(chunk, _C.Kind.FORWARD, i)
            for chunk in chunks_of(stage, pp * segments, pp, style)
            for i in range(micro_batches)
        ]
        for stage in range(pp)
    ]
    return _C.Schedule(pp, segments, micro_batches, ranks, style)


def shortened(schedule: _C.Schedule, micro_batches: int) -> _C.Schedule:
    """Returns the schedule of a step with fewer micro-batches: the actions of those that are missing are left out.

    What is left keeps its order, so that it waits for nothing that it did not wait for before.

    Args:
        micro_batches: 1 to those of `schedule`.
    """
    ranks = [[action for action in rank if action.micro_batch < micro_batches] for rank in schedule.ranks]
    return _C.Schedule(schedule.pp, schedule.segments, micro_batches, ranks, schedule.style)


def lower(
    schedule: _C.Schedule,
    *,
    reduce: bool,
    recompute: Sequence[bool] = (),
    offload: Sequence[bool] = (),
    offload_share: float = 1.0,
    prefetch_distance: int = 2,
) -> _C.Schedule:
    """Returns the schedule with SEND and RECV, and if `reduce` REDUCE_GRAD after each chunk's last backward.

    Args:
        recompute: of every chunk whether it keeps no graph between forward and backward: RECOMPUTE makes it again.
            Where a backward follows its own forward the graph stays. Empty: no chunk.
        offload: of every chunk whether its stashes leave the device: OFFLOAD after their forward, PREFETCH before their
            first use, unless that comes soon. Empty: no chunk. Where one does, what a chunk takes from another one, and
            does not use soon, waits in the pool, too: OFFLOAD_F after the forward that made it on the same rank,
            PREFETCH_F before its use; OFFLOAD_B, PREFETCH_B for gradients. What a message brings lands in the pool
            (Fold3D V-C).
        offload_share: of the micro-batches for which they do, spread evenly over them, in (0, 1].
        prefetch_distance: compute actions of the rank that a stash comes back ahead of its use; two, since copies the
            other way may be in its way.
    Raises: ConfigError, with the grid, if the schedule is not valid.
    """
    with _config_errors():
        lazy = any(offload)
        return _C.lower(schedule, reduce, list(recompute), list(offload), prefetch_distance, lazy, offload_share)


def without_flush(name: str, *, pp: int, micro_batches: int) -> tuple[_C.Schedule, _C.Schedule, _C.Schedule]:
    """Returns what the ranks run of steps that follow each other without a flush (PipeDream-2BW), lowered and proven.

    Args:
        name: "1f1b".
        micro_batches: of each step, at least pp.
    Returns: the list of the step after a drain; of every other step, where a backward that stands before its forward is
        left of the step before; and of what is left at the end.
    Raises: ConfigError where a schedule cannot be had so.
    """
    with _config_errors():
        return _C.without_flush(name, pp, 1, micro_batches)


def by_micro_batch(pp: int, steps: int) -> list[_C.Schedule]:
    """Returns what the ranks run of `steps` steps of one micro-batch each that follow each other without a flush, an
    update after each (PipeDream), lowered and proven: a list for each step, and pp - 1 for what is left at the end.

    Micro-batch k has the number k modulo pp. A step has the backward of the micro-batch pp - 1 - stage before, if there
    is one.
    """
    with _config_errors():
        return _C.by_micro_batch(pp, steps)


def validate_room(
    schedule: _C.Schedule,
    *,
    device: int | None,
    pool: int | None,
    stash_bytes: Sequence[int] = (),
    sent_bytes: Sequence[int] = (),
) -> None:
    """Proves that what forwards stash has room on each rank's device, and in its pool, at every moment of the schedule.

    Args:
        device, pool: bytes, or numbers of stashes without `stash_bytes`; None: any.
        stash_bytes: of a stash of each chunk.
        sent_bytes: what each chunk hands to the next for a micro-batch, and gets back; empty: not counted.
    Raises: ConfigError, which names the rank, what it needs and what there is.
    """
    with _config_errors():
        _C.validate_room(schedule, device, pool, stash_bytes, sent_bytes)


def validate(schedule: _C.Schedule, *, forward_only: bool = False) -> None:
    """Proves that the schedule is complete, correctly ordered and free of deadlock.

    Raises: ConfigError, with the grid and the offending cell marked, if it is not.
    """
    with _config_errors():
        _C.validate(schedule, forward_only)
