"""System: what can be compared, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.cluster.scenarios import Scenario

Record = tuple[str, str, int, int]
"""(lane, action, start, end) in ns of the machine's monotonic clock."""
LANES = ("compute", "recv_f", "recv_b", "reduce", "gather")
"""Of records."""
COMM_TIMEOUT = 60.0
"""Seconds after which a rank that waits for another gives up, in every system."""
LEARNING_RATE = 1e-3
"""Of the optimizer, plain SGD in every system."""


class Rank(Protocol):
    """A system on one rank; every rank makes the same calls."""

    def step(self) -> None:
        """Runs one optimizer step."""

    def warmed_up(self) -> None:
        """The steps from here on are measured: drops what was recorded so far."""

    def records(self) -> Sequence[Sequence[Record]]:
        """Returns what was recorded, step by step; empty where the system does not say."""

    def breakdown(self) -> dict[str, float]:
        """Returns where the last step's time went, in ms; empty where the system does not say."""

    def timeline(self) -> Sequence[Sequence[Any]]:
        """Returns the last step's records for fold3d.observe.timeline: lane, action, start, end, bytes."""

    def choice(self) -> dict[str, Any]:
        """Returns how this rank is set up; empty where the system does not say."""

    def close(self) -> None:
        """Ends communication; all ranks call."""


@dataclass(frozen=True, slots=True)
class Family:
    """A system without its number of segments."""

    library: str
    schedule: str
    help: str
    folds: bool = True
    """Whether it takes a number: of segments; where the library is "data", of buckets or groups of layers."""
    group_size: str = "auto"
    """N: "auto", which is the planner's or the schedule's own, or "m", all micro-batches."""
    dp_sync: str = ""
    """fold3d's setting, or "all-reduce" for torch's."""
    waits: bool = False
    """Whether a step ends only when the sums are everywhere: they overlap the backward, not the next forward."""
    preempt: bool = True
    recompute: str = "none"
    """fold3d's setting."""
    offload: str = "none"
    """fold3d's setting."""
    gradient_delay: int = 0
    """fold3d's setting."""
    warm_up: int = 1
    """Steps until it does the same in every step; the first also connects and allocates."""


PLANNED = 4
"""Steps until fold3d has measured its links and its times, planned by them, and run by that plan."""

FAMILIES = {
    "fold3d-auto": Family("fold3d", "auto", "fold3d as it plans itself", folds=False, dp_sync="auto", warm_up=PLANNED),
    "fold3d-aiao-zero1": Family(
        "fold3d", "aiao", "parameters gathered under the next forward", dp_sync="zero1", warm_up=PLANNED
    ),
    "fold3d-aiao-early": Family(
        "fold3d", "aiao", "gradients gathered in idle network time", dp_sync="early", warm_up=PLANNED
    ),
    "fold3d-aiao-unordered": Family(
        "fold3d", "aiao", "the same, first come, first served", dp_sync="early", preempt=False, warm_up=PLANNED
    ),
    "fold3d-aiao-activations": Family(
        "fold3d",
        "aiao",
        "as -early; what layers save leaves the accelerator",
        dp_sync="early",
        offload="activations",
        warm_up=PLANNED,
    ),
    "fold3d-aiao-blocks": Family(
        "fold3d", "aiao", "as -early; layers run again", dp_sync="early", recompute="blocks", warm_up=PLANNED
    ),
    "fold3d-aiao-boundaries": Family(
        "fold3d",
        "aiao",
        "the same, and their inputs leave",
        dp_sync="early",
        recompute="blocks",
        offload="boundaries",
        warm_up=PLANNED,
    ),
    "fold3d-aiao-limited": Family(
        "fold3d",
        "aiao",
        "as -early; fold3d makes it fit into half of what layers save",
        dp_sync="early",
        recompute="auto",
        offload="auto",
        warm_up=PLANNED,
    ),
    "fold3d-interleaved-serial": Family(
        "fold3d", "interleaved", "sums after the pipeline", dp_sync="serial", warm_up=PLANNED
    ),
    "fold3d-interleaved-npp": Family(
        "fold3d", "interleaved", "sums under the backward, then awaited", dp_sync="early", waits=True, warm_up=PLANNED
    ),
    "fold3d-interleaved-nm": Family(
        "fold3d", "fold", "the same with N = m", group_size="m", dp_sync="early", waits=True, warm_up=PLANNED
    ),
    "fold3d-1f1b": Family("fold3d", "1f1b", "one forward, one backward", folds=False, dp_sync="early", warm_up=PLANNED),
    "fold3d-auto-late": Family(
        "fold3d",
        "auto",
        "fold3d-auto with gradients of the step before: other numbers",
        folds=False,
        dp_sync="auto",
        gradient_delay=1,
        warm_up=PLANNED,
    ),
    "fold3d-1f1b-late": Family(
        "fold3d",
        "1f1b",
        "fold3d-1f1b with gradients of the step before: other numbers",
        folds=False,
        dp_sync="early",
        gradient_delay=1,
        warm_up=PLANNED,
    ),
    "torch-1f1b": Family("torch", "Schedule1F1B", "torch.distributed.pipelining", folds=False, dp_sync="all-reduce"),
    "torch-interleaved": Family(
        "torch", "ScheduleInterleaved1F1B", "torch.distributed.pipelining", dp_sync="all-reduce"
    ),
    "torch-bfs": Family(
        "torch", "ScheduleLoopedBFS", "torch.distributed.pipelining, breadth first", dp_sync="all-reduce"
    ),
    "torch-ddp": Family("data", "ddp", "DistributedDataParallel, no_sync but for the last micro-batch"),
    "torch-fsdp2": Family("data", "zero2", "fully_shard; weights are gathered once a step, as gradients are reduced"),
    "torch-fsdp2-zero3": Family("data", "zero3", "the same; weights are gathered for each pass of each micro-batch"),
    "torch-hsdp": Family("data", "hsdp", "fully_shard within a host, all-reduce across, once a step each"),
    "torch-hsdp-scatter": Family("data", "hsdp-scatter", "the same; each micro-batch is reduced within the host"),
    "load": Family("load", "", "DP.sync without a pause beside messages at a steady pace", folds=False, warm_up=2),
    "load-unordered": Family("load", "", "the same, first come, first served", folds=False, preempt=False, warm_up=2),
}
REFERENCE = "fold3d-auto"
"""What the others are compared with."""

DEFAULT_ON_DEVICE = (REFERENCE, "torch-1f1b", "torch-interleaved:2,4,8", "torch-bfs:2,4,8")
"""What runs on the simulated device."""
DEFAULT = (
    *(REFERENCE, "fold3d-aiao-zero1", "fold3d-aiao-early", "fold3d-interleaved-serial", "fold3d-interleaved-npp"),
    *("fold3d-interleaved-nm", "fold3d-1f1b", "torch-1f1b", "torch-interleaved:2,4,8", "torch-bfs:2,4,8"),
)


@dataclass(frozen=True, slots=True)
class System:
    """A family with its number of segments."""

    name: str
    family: Family
    segments: int
    """1 where the family takes no number; what "auto" chooses is not known here."""
    device: str = "cpu"
    """What the layers compute on: "cpu", or "sim", the simulated device of simdevice/."""

    def group_size(self, scenario: Scenario) -> int | str:
        """Returns the setting N."""
        return scenario.micro_batches if self.family.group_size == "m" else self.family.group_size


def on_device(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names for the simulated device, and before them the reference on the CPU."""
    return (REFERENCE, *(name if "@" in name else f"{name}@sim" for name in names))


def find_systems(name: str, scenario: Scenario) -> list[System]:
    """Returns the candidates of NAME:SEGMENTS,SEGMENTS...@DEVICE; one without a comma.

    Raises: ValueError as `find_system`.
    """
    name, at, device = name.partition("@")
    base, colon, numbers = name.partition(":")
    return [find_system(base + colon + number + at + device, scenario) for number in numbers.split(",")]


def find_system(name: str, scenario: Scenario) -> System:
    """Returns the system called NAME or NAME:SEGMENTS; without a number it has the scenario's segments. With "@sim"
    behind it computes on the simulated device.

    Raises: ValueError for an unknown name or device, or a number of segments the scenario's layers do not divide into.
    """
    whole, at, device = name.partition("@")
    if at and device != "sim":
        raise ValueError(f"system {name!r}: the device {device!r} is unknown; there is @sim, and none for the CPU")
    base, _, number = whole.partition(":")
    family = FAMILIES.get(base)
    if family is None:
        raise ValueError(f"system {base!r} is unknown; there are {', '.join(FAMILIES)}, some with :SEGMENTS")
    if number and not family.folds:
        raise ValueError(f"system {name!r}: segments have no effect on {base}; remove :{number}")
    if number and not number.isdecimal():
        raise ValueError(f"system {name!r}: the number of segments must be an integer, not {number!r}")
    data = family.library == "data"
    if data and scenario.micro_batches % scenario.pp:
        raise ValueError(
            f"system {name!r}: the {scenario.micro_batches} micro-batches of a replica do not divide over its "
            f"{scenario.pp} ranks"
        )
    if family.schedule.startswith("hsdp") and scenario.ranks < 2 * scenario.shards:
        raise ValueError(
            f"system {name!r} needs two hosts of {scenario.shards} ranks; there are {scenario.ranks} ranks"
        )
    layers = scenario.layers * (scenario.pp if data else 1)
    segments = int(number) if number else layers if data else scenario.segments if family.folds else 1
    if segments < 1 or layers % segments:
        raise ValueError(
            f"system {name!r}: {segments} segments do not divide the {layers} layers that a rank has in "
            f"scenario {scenario.name}"
        )
    if at and family.library in ("load", "data"):
        raise ValueError(f"system {name!r} computes nothing on a device; remove @sim")
    return System((f"{base}:{segments}" if family.folds else base) + at + device, family, segments, device or "cpu")
