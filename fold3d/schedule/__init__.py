"""Schedules as data: generate, read, write, check, time and draw them; thin over fold3d._C."""

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
    check_group_size,
    forward_only,
    generate,
    lower,
    names,
    registry,
    shortened,
    validate,
    validate_room,
)

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "SchedulerInfo",
    "Span",
    "Timeline",
    "check_group_size",
    "forward_only",
    "generate",
    "grid",
    "load_csv",
    "lower",
    "names",
    "parse_action",
    "parse_csv",
    "partition",
    "peak_stash",
    "registry",
    "save_csv",
    "shortened",
    "stash_peaks",
    "unit_timeline",
    "validate",
    "validate_room",
    "waits_for",
]
