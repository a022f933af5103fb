"""The options of the link over which ranks that share weights sum their parts."""

from __future__ import annotations

import argparse
from typing import Any, TypedDict

from fold3d.config import AUTO, TP_WAYS
from fold3d.errors import ConfigError


class TpLink(TypedDict):
    """Of a rank within its tensor-parallel group, as NetworkCosts calls it."""

    tp_bandwidth: float
    """Bytes per second."""
    tp_latency: float
    """Of a hop, in seconds."""


def add(group: Any) -> None:
    """Adds them to a group of options that has --tp and --tp-overlap elsewhere."""
    group.add_argument(
        "--tp-bandwidth",
        type=float,
        metavar="GBIT",
        help="bandwidth per process within a tensor-parallel group; default 100",
    )
    group.add_argument(
        "--tp-latency", type=float, metavar="US", help="latency of a message within a tensor-parallel group; default 10"
    )


def link_of(options: argparse.Namespace, *, has_tp: bool) -> TpLink:
    """Returns what was asked for. Raises: ConfigError for what makes no sense, or has no effect without --tp."""
    numbers = {"--tp-bandwidth": options.tp_bandwidth, "--tp-latency": options.tp_latency}
    for name, value in {**numbers, "--tp-overlap": options.tp_overlap}.items():
        if value is not None and not has_tp:
            raise ConfigError(f"{name}={value} has no effect without --tp; remove it, or add --tp 2")
    for name, value in numbers.items():
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{name} is {value:g}; it must be positive, and below 1e9")
    return TpLink(tp_bandwidth=(options.tp_bandwidth or 100.0) * 1e9 / 8, tp_latency=(options.tp_latency or 10.0) / 1e6)


def overlap_of(options: argparse.Namespace) -> str:
    """Returns how sums are hidden. Raises: ConfigError for another way."""
    overlap: str = options.tp_overlap or AUTO
    if overlap not in (AUTO, *TP_WAYS):
        raise ConfigError(f"--tp-overlap is {overlap!r}; it must be one of {', '.join((AUTO, *TP_WAYS))}")
    return overlap
