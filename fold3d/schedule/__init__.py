"""Schedules as data: generate, read, write, check, time and draw them. Needs no device and no process group; all of it
is deterministic. The work is done in C++ (fold3d._C)."""

import torch  # noqa: F401  loads the libraries that _C is linked with

from fold3d._C import (
    Action,
    Kind,
    Schedule,
    SchedulerInfo,
    Span,
    Timeline,
    grid,
    parse_action,
    partition,
    peak_stash,
    stash_peaks,
    unit_timeline,
    waits_for,
)
from fold3d.schedule.files import load_csv, parse_csv, save_csv
from fold3d.schedule.library import (
    by_micro_batch,
    check_group_size,
    forward_only,
    generate,
    lower,
    names,
    only_segments,
    registry,
    shortened,
    style_of,
    validate,
    validate_room,
    without_flush,
)

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "SchedulerInfo",
    "Span",
    "Timeline",
    "by_micro_batch",
    "check_group_size",
    "forward_only",
    "generate",
    "grid",
    "load_csv",
    "lower",
    "names",
    "only_segments",
    "parse_action",
    "parse_csv",
    "partition",
    "peak_stash",
    "registry",
    "save_csv",
    "shortened",
    "stash_peaks",
    "style_of",
    "unit_timeline",
    "validate",
    "validate_room",
    "waits_for",
    "without_flush",
]
