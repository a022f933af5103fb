"""The registered schedules, CSV files in the form of torch.distributed.pipelining (one line per rank, cells like 2F0),
and what can be done to any schedule; errors become ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.topology import LOOP, chunks_of

_MOST_FORWARDS = 10**7  # of all ranks; a step of hours, and gigabytes of actions


@contextmanager
def config_errors() -> Iterator[None]:
    """Turns the ValueError of the C++ part into ConfigError, which the package raises for bad settings."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parse_csv(text: str) -> _C.Schedule:
    """Returns the schedule written in `text`; empty cells are idle steps and are dropped.

    pp is the number of lines; segments and micro-batches follow from the largest chunk and micro-batch.

    Raises: ConfigError naming line and column of a cell that is not an action.
    """
    with config_errors():
        return _C.parse_csv(text)


def load_csv(path: str | PathLike[str]) -> _C.Schedule:
    """Returns the schedule in a CSV file; it is not validated yet.

    Raises: ConfigError if the file cannot be read or has a cell that is not an action.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the schedule {str(path)!r}: {error}") from None
    try:
        return parse_csv(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_csv(schedule: _C.Schedule, path: str | PathLike[str]) -> None:
    """Writes the schedule; `load_csv` gives it back, and torch's own loader takes it."""
    Path(path).write_text(schedule.csv(), encoding="utf-8")


def registry() -> list[_C.SchedulerInfo]:
    """Returns an entry for every schedule: its name, help text, and the parameters that it uses."""
    return _C.registry()


def names() -> list[str]:
    """Returns the names `generate` accepts."""
    return [info.name for info in _C.registry()]


def only_segments(name: str) -> int | None:
    """Returns the one number of segments that a registered schedule can have, None if it can have any; 1 for an unknown
    name."""
    return next((info.segments or (None if info.uses_segments else 1) for info in registry() if info.name == name), 1)


def style_of(name: str) -> str:
    """Returns on which stages the chunks of a schedule live, "loop" or "v".

    Args:
        name: of a schedule, or path of a CSV file. Anything else is "loop".
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
        micro_batches: m per step and replica; any number, also fewer than pp.
        group_size: N, micro-batches that pass a segment before the next starts. None: the schedule's default.
        turn: "all" or "1f1b", how the last segment turns from forwards to backwards. None: the schedule's default.
    Raises: ConfigError for an unknown name, a size below 1, a parameter that the schedule does not use, or more than
        10^7 forwards in a step.
    """
    check_group_size(group_size)
    if pp * segments * micro_batches > _MOST_FORWARDS and min(pp, segments, micro_batches) > 0:
        raise ConfigError(
            f"pp={pp} segments={segments} micro_batches={micro_batches}: more than {_MOST_FORWARDS:.0e} forwards in "
            "one step; lower micro_batches"
        )
    with config_errors():
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
    """Returns the schedule of a step with fewer micro-batches: the same order without the actions of the others.

    Args:
        micro_batches: from 1 to that of `schedule`.
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
        reduce: whether to add REDUCE_GRAD, for several replicas.
        recompute: per chunk, whether it keeps no graph between forward and backward, so that RECOMPUTE runs its forward
            again. If a backward directly follows its forward the graph stays. Empty: no chunk.
        offload: per chunk, whether its stashes leave the device: OFFLOAD after their forward, PREFETCH before their
            first use, unless that comes soon. Empty: no chunk. If any chunk does, activations that wait for another
            chunk are in the pool as well: OFFLOAD_F after the forward that made them on the same rank, PREFETCH_F
            before their use; OFFLOAD_B and PREFETCH_B for gradients. Messages are received into the pool (Fold3D, Li et
            al. 2023, V-C).
        offload_share: part of the micro-batches whose stashes leave, spread evenly over them, in (0, 1].
        prefetch_distance: how many compute actions of the rank before its use a stash comes back. The default is two
            because copies in the other direction may be in its way.
    Raises: ConfigError, with the grid, if the schedule is not valid.
    """
    with config_errors():
        lazy = any(offload)
        return _C.lower(schedule, reduce, list(recompute), list(offload), prefetch_distance, lazy, offload_share)


def without_flush(name: str, *, pp: int, micro_batches: int) -> tuple[_C.Schedule, _C.Schedule, _C.Schedule]:
    """Returns the schedules of steps without a flush between them (PipeDream-2BW), lowered and validated.

    Args:
        name: "1f1b".
        micro_batches: of each step, at least pp.
    Returns: the schedule of a step after a drain; of every other step, in which a backward before its own forward is of
        the step before; and of the drain.
    Raises: ConfigError for another schedule, or fewer micro-batches.
    """
    with config_errors():
        return _C.without_flush(name, pp, 1, micro_batches)


def by_micro_batch(pp: int, steps: int) -> list[_C.Schedule]:
    """Returns the schedules of `steps` steps of one micro-batch each, without a flush and with an update after each
    (PipeDream), lowered and validated: one for each step, and pp - 1 for the drain.

    Micro-batches are numbered modulo pp. On a stage a step has the backward of the micro-batch pp - 1 - stage steps
    before, if there is one.
    """
    with config_errors():
        return _C.by_micro_batch(pp, steps)


def validate_room(
    schedule: _C.Schedule,
    *,
    device: int | None,
    pool: int | None,
    stash_bytes: Sequence[int] = (),
    sent_bytes: Sequence[int] = (),
) -> None:
    """Proves that stashes fit on each rank's device, and into its pool, at every moment of the schedule.

    Args:
        device, pool: their sizes in bytes, or in numbers of stashes without `stash_bytes`. None: no limit.
        stash_bytes: bytes of a stash, per chunk.
        sent_bytes: bytes that each chunk sends to the next for a micro-batch, and gets back. Empty: not counted.
    Raises: ConfigError, which names the rank, what it needs and what there is.
    """
    with config_errors():
        _C.validate_room(schedule, device, pool, stash_bytes, sent_bytes)


def validate(schedule: _C.Schedule, *, forward_only: bool = False) -> None:
    """Proves that the schedule is complete, correctly ordered and free of deadlock.

    Raises: ConfigError, with the grid and the offending cell marked, if it is not.
    """
    with config_errors():
        _C.validate(schedule, forward_only)
