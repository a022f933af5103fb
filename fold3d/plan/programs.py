"""Programs: the schedules that the ranks run."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.space.offload import KNOB as OFFLOAD
from fold3d.plan.space.offload import offloaded_chunks
from fold3d.plan.strategy import Strategy
from fold3d.recompute import Recompute


class Programs:
    """The lowered schedules of a run, one per number of micro-batches: the last step of an epoch may have fewer."""

    def __init__(
        self,
        name: str,
        group_size: int | None,
        *,
        dp: int,
        pp: int,
        segments: int,
        micro_batches: int,
        recompute: Recompute | None = None,
        offload: Sequence[bool] = (),
        offload_share: float = 1.0,
    ) -> None:
        """Args:
            name: of a schedule, or path of a CSV file.
            recompute: what the chunks compute again; None: nothing.
            offload: of every chunk, whether its stashes leave the device; empty: none does. Where one does, so
                does what crosses chunk borders and waits.
            offload_share: of the micro-batches whose stashes do.
        Raises: ConfigError when that is said of another number of chunks.
        """
        self._without_graph = [] if recompute is None else recompute.without_graph(pp * segments)
        self._offload, self._offload_share = offload, offload_share
        self._name, self._group_size = name, group_size
        self._pp, self._segments, self._micro_batches = pp, segments, micro_batches
        self._reduce = dp > 1
        self._training: dict[int, schedules.Schedule] = {}
        self._evaluation: dict[int, schedules.Schedule] = {}
        self._file: schedules.Schedule | None = None

    @classmethod
    def of(cls, strategy: Strategy) -> Programs:
        """Returns the programs of a strategy."""
        return cls(
            strategy.schedule,
            strategy.group_size,
            dp=strategy.dp,
            pp=strategy.pp,
            segments=strategy.segments,
            micro_batches=strategy.micro_batches,
            recompute=Recompute.read(dict(strategy.settings).get("recompute", "none")),
            offload=offloaded_chunks(strategy),
            offload_share=OFFLOAD.of(strategy).share,
        )

    def compute(self, micro_batches: int) -> schedules.Schedule:
        """Returns the compute actions for `micro_batches` micro-batches.

        A schedule from a file is for as many as the strategy has; a step with fewer leaves out the actions of the
        missing ones.

        Raises: ConfigError when the schedule is unknown, does not fit, or ignores a setting that was given.
        """
        if self._name.endswith(".csv"):
            return self._from_file(self._name, micro_batches)
        return schedules.generate(
            self._name,
            pp=self._pp,
            segments=self._segments,
            micro_batches=micro_batches,
            group_size=None if self._group_size is None else min(self._group_size, micro_batches),
        )

    def training(self, micro_batches: int) -> schedules.Schedule:
        """Returns the schedule of one optimizer step with all communication in it."""
        if micro_batches not in self._training:
            self._training[micro_batches] = schedules.lower(
                self.compute(micro_batches),
                reduce=self._reduce,
                recompute=self._without_graph,
                offload=self._offload,
                offload_share=self._offload_share,
            )
        return self._training[micro_batches]

    def evaluation(self, micro_batches: int = 1) -> schedules.Schedule:
        """Returns the forward passes of one batch, or several, through all chunks."""
        if micro_batches not in self._evaluation:
            forward = schedules.forward_only(
                self._pp, self._segments, micro_batches, self.compute(self._micro_batches).style
            )
            self._evaluation[micro_batches] = schedules.lower(forward, reduce=False)
        return self._evaluation[micro_batches]

    def _from_file(self, path: str, micro_batches: int) -> schedules.Schedule:
        if self._file is None:  # read once: a step in the middle of training must not depend on the file
            schedule = schedules.load_csv(path)
            schedules.validate(schedule)
            if self._group_size is not None:
                raise ConfigError(f"group_size={self._group_size} has no effect with a schedule from a file; remove it")
            self._file = schedule
        schedule = self._file
        found = (schedule.pp, schedule.segments, schedule.micro_batches)
        if found != (self._pp, self._segments, self._micro_batches) or micro_batches > schedule.micro_batches:
            raise ConfigError(
                f"schedule={path!r} is for (pp, segments, micro-batches) = {found}, this step has "
                f"{(self._pp, self._segments, micro_batches)}; generate a file that fits, or name a schedule"
            )
        return schedule if micro_batches == schedule.micro_batches else schedules.shortened(schedule, micro_batches)
