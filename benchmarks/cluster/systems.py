"""System: what can be compared, by name, and how it is built on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.cluster.scenarios import Scenario

Record = tuple[str, str, int, int]
"""(lane, action, start, end) in ns of the machine's monotonic clock; lanes compute, recv_f, recv_b and reduce."""
COMM_TIMEOUT = 60.0
"""Seconds after which a rank that waits for another gives up, in every system."""
LEARNING_RATE = 1e-3
"""Of the optimizer, plain SGD in every system."""


class Rank(Protocol):
    """A system on one rank; every rank makes the same calls."""

    def step(self) -> None:
        """Runs one optimizer step."""

    def records(self) -> Sequence[Record]:
        """Returns when the last step computed, received and summed what; empty where the system does not say."""

    def close(self) -> None:
        """Ends communication."""


@dataclass(frozen=True, slots=True)
class Family:
    """A system without its number of segments."""

    library: str
    schedule: str
    help: str
    folds: bool = True
    """Whether it takes a number of segments."""


FAMILIES = {
    "fold3d-aiao": Family("fold3d", "aiao", "fold3d, all forward passes of a segment in one go"),
    "fold3d-interleaved": Family("fold3d", "interleaved", "fold3d, Megatron's interleaved order"),
    "fold3d-1f1b": Family("fold3d", "1f1b", "fold3d, one forward, one backward", folds=False),
    "torch-1f1b": Family("torch", "Schedule1F1B", "torch.distributed.pipelining", folds=False),
    "torch-interleaved": Family("torch", "ScheduleInterleaved1F1B", "torch.distributed.pipelining"),
    "torch-bfs": Family("torch", "ScheduleLoopedBFS", "torch.distributed.pipelining, breadth first"),
}

DEFAULT = (
    *("fold3d-aiao", "fold3d-interleaved", "fold3d-1f1b", "torch-1f1b"),
    *(f"{name}:{segments}" for name in ("torch-interleaved", "torch-bfs") for segments in (2, 4, 8)),
)


@dataclass(frozen=True, slots=True)
class System:
    """A family with its number of segments."""

    name: str
    family: Family
    segments: int

    def on_this_rank(self, scenario: Scenario) -> Rank:
        """Builds the system on the calling rank of an initialized job; all ranks call."""
        # Imported here: the process that starts the ranks needs neither.
        if self.family.library == "fold3d":
            from benchmarks.cluster.fold3d_rank import Fold3dRank

            return Fold3dRank(scenario, self.family.schedule, self.segments)
        from benchmarks.cluster.torch_rank import TorchRank

        return TorchRank(scenario, self.family.schedule, self.segments)


def find_system(name: str, scenario: Scenario) -> System:
    """Returns the system called NAME or NAME:SEGMENTS; without a number it has the scenario's segments.

    Raises: ValueError for an unknown name or a number of segments the scenario's layers do not divide into.
    """
    base, _, number = name.partition(":")
    family = FAMILIES.get(base)
    if family is None:
        raise ValueError(f"system {base!r} is unknown; there are {', '.join(FAMILIES)}, some with :SEGMENTS")
    if number and not family.folds:
        raise ValueError(f"system {name!r}: segments have no effect on {base}; leave :{number} away")
    if number and not number.isdecimal():
        raise ValueError(f"system {name!r}: the number of segments must be an integer, not {number!r}")
    segments = int(number) if number else scenario.segments if family.folds else 1
    if segments < 1 or scenario.layers % segments:
        raise ValueError(
            f"system {name!r}: {segments} segments do not divide the {scenario.layers} layers that a rank has in "
            f"scenario {scenario.name}"
        )
    return System(f"{base}:{segments}" if family.folds else base, family, segments)
