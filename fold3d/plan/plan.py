"""Plan: what the ranks must agree on before the first step; the one thing that crosses from planning to execution."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from fold3d import schedule as schedules
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which blocks each chunk holds and in which order the chunks compute."""

    config: ParallelConfig
    dp: int
    """Data-parallel replicas, resolved."""
    blocks: tuple[str, ...]
    """Module names of the model's blocks, in execution order."""
    ranges: tuple[tuple[int, int], ...]
    """Blocks [first, end) of every chunk; one entry (0, number of blocks) when the model is not cut."""
    schedule_csv: str
    """Compute actions of every stage for config.micro_batches micro-batches."""

    def to_json(self) -> str:
        """Returns the plan as canonical JSON: equal plans give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    def digest(self) -> str:
        """Returns a short hash of the plan, compared over all ranks at start."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


class Programs:
    """The lowered schedules of a run, one per number of micro-batches: the last step of an epoch may have fewer."""

    def __init__(self, config: ParallelConfig, dp: int):
        self._config = config
        self._reduce = dp > 1
        self._training: dict[int, schedules.Schedule] = {}
        self._evaluation: schedules.Schedule | None = None
        self._file: schedules.Schedule | None = None

    def compute(self, micro_batches: int) -> schedules.Schedule:
        """Returns the compute actions for `micro_batches` micro-batches.

        A schedule from a file is for config.micro_batches; a step with fewer leaves out the actions of the missing
        ones.

        Raises: ConfigError when the schedule is unknown, does not fit, or ignores a setting that was given.
        """
        config = self._config
        name = config.schedule_name
        if name.endswith(".csv"):
            return self._from_file(name, micro_batches)
        return schedules.generate(
            name,
            pp=config.pp,
            segments=config.num_segments,
            micro_batches=micro_batches,
            group_size=min(config.group_size, micro_batches) if isinstance(config.group_size, int) else None,
        )

    def training(self, micro_batches: int) -> schedules.Schedule:
        """Returns the schedule of one optimizer step with all communication in it."""
        if micro_batches not in self._training:
            self._training[micro_batches] = schedules.lower(self.compute(micro_batches), reduce=self._reduce)
        return self._training[micro_batches]

    def evaluation(self) -> schedules.Schedule:
        """Returns the forward pass of one batch through all chunks."""
        if self._evaluation is None:
            forward = schedules.forward_only(self._config.pp, self._config.num_segments)
            self._evaluation = schedules.lower(forward, reduce=False)
        return self._evaluation

    def _from_file(self, path: str, micro_batches: int) -> schedules.Schedule:
        config = self._config
        if self._file is None:  # read once: a step in the middle of training must not depend on the file
            schedule = schedules.load_csv(path)
            schedules.validate(schedule)
            if isinstance(config.group_size, int):
                raise ConfigError(
                    f"group_size={config.group_size} has no effect with a schedule from a file; remove it"
                )
            self._file = schedule
        schedule = self._file
        found = (schedule.pp, schedule.segments, schedule.micro_batches)
        if found != (config.pp, config.num_segments, config.micro_batches) or micro_batches > schedule.micro_batches:
            raise ConfigError(
                f"schedule={path!r} is for (pp, segments, micro-batches) = {found}, this step has "
                f"{(config.pp, config.num_segments, micro_batches)}; generate a file that fits, or name a schedule"
            )
        return schedule if micro_batches == schedule.micro_batches else schedules.shortened(schedule, micro_batches)
