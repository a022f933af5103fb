"""PipeDream's planner (Narayanan et al. 2019): layers are cut into stages, and each stage is replicated by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.schedule.library import config_errors

COSTS = ("ring", "text")
"""What an all-reduce of W bytes over m replicas takes on links of bandwidth B: "ring": 2 (m - 1) / m W / B, what a ring
takes; "text": 2 (m - 1) W / B, as the recurrence is printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """Layers one after the other, which may be cut between any two."""

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    """Of each layer: forward and backward of one input (a micro-batch)."""
    sent_bytes: tuple[float, ...]
    """What crosses the cut behind each layer for one input; its gradient is as large."""
    parameter_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """Machines joined by links of one speed."""

    components: int
    """Of the level below it; of the first level: workers."""
    bandwidth: float
    """Bytes per second of a link."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, end) of a row, on `replicas` workers that take its inputs in turn."""

    first: int
    end: int
    replicas: int


@dataclass(frozen=True, slots=True)
class PipedreamPlan:
    """How PipeDream would train."""

    seconds: float
    """Of the slowest stage, for one input: how often an input is done in the steady state."""
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """As the papers write it: "15-1", replicas of each stage; "straight" where there are several stages and all
        have one; "16" for data parallelism."""
        if len(self.stages) > 1 and all(stage.replicas == 1 for stage in self.stages):
            return "straight"
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def workers(self) -> int:
        """All of them."""
        return sum(stage.replicas for stage in self.stages)

    @property
    def noam(self) -> int:
        """Inputs that a replica of the first stage admits before it takes the first gradient (NOAM, section 3.2)."""
        return math.ceil(self.workers / self.stages[0].replicas)

    @property
    def warm_up(self) -> tuple[int, ...]:
        """Forwards that a replica of each stage runs before its first backward. One more is the number of weight
        versions, and of inputs in flight, that it holds."""
        before, found = 0, []
        for stage in self.stages:
            found.append((self.workers - 1 - before) // stage.replicas)
            before += stage.replicas
        return tuple(found)


def pipedream(row: LayerRow, levels: Sequence[Level], cost: str = "ring") -> PipedreamPlan:
    """Returns the partition with the fastest slowest stage, by the recurrence of chapter 2 of Narayanan's dissertation.

    Args:
        row: the model, such as `LayerGraph.row()`.
        levels: of the machines, the innermost first; all workers are used.
        cost: one of COSTS.
    Raises: ConfigError for an unknown cost, and for costs or levels that cannot be.
    """
    if cost not in COSTS:
        raise ConfigError(f"cost={cost!r}: set it to one of {', '.join(COSTS)}")
    machines = [(level.components, level.bandwidth) for level in levels]
    with config_errors():
        seconds, stages = _C.pipedream(row.seconds, row.sent_bytes, row.parameter_bytes, machines, cost == "text")
    return PipedreamPlan(seconds, tuple(Stage(*stage) for stage in stages))
