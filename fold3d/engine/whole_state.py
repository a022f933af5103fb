"""WholeState: the state of an Engine, that of the whole model on every rank."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from fold3d.comms.groups import Groups
from fold3d.config import ParallelConfig
from fold3d.engine import state
from fold3d.engine.built import BuiltRank
from fold3d.faults.supervisor import Supervisor


class WholeState(ABC):
    """The saving half of `Engine`."""

    config: ParallelConfig
    optimizer: Optimizer | None
    step_index: int
    _supervisor: Supervisor

    @abstractmethod
    def _built(self) -> BuiltRank:
        """Returns what this rank trains with."""

    @property
    @abstractmethod
    def groups(self) -> Groups:
        """Returns the groups of this rank."""

    @abstractmethod
    def meet(self, call: str) -> None:
        """Waits until every rank has come to the same `call`."""

    @abstractmethod
    def flush(self) -> None:
        """Brings this rank's parameters up to date."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole model's weights, optimizer state and step counter, by original names; all ranks call.

        The same on every rank, on the CPU, independent of dp, tp, pp and segments.
        """
        self.meet("engine.state_dict()")
        cut, groups = self._built().cut, self.groups
        with self._supervisor.together("gathering the state"), self.whole_optimizer_state():
            return {
                "model": state.gather_model(cut, groups.replica, groups.data),
                "optimizer": state.gather_optimizer(cut, self.optimizer, groups.replica),
                "step_index": self.step_index,
            }

    @contextlib.contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """Weights are up to date and the optimizer's state is whole on this rank in the body; all ranks run it."""
        sync = self._built().sync
        sync.collect_state()
        try:
            yield
        finally:
            sync.release_state()

    def load_state_dict(self, full: Mapping[str, Any]) -> None:
        """Takes this rank's share of what `state_dict` returned, under any layout.

        Raises: CheckpointError when names or shapes do not match; nothing has changed then.
        """
        rank = self._built()
        self.flush()
        state.load(rank.cut, self.optimizer, full, on_host=self.config.offload_optimizer)
        rank.sync.split_state()
        self.step_index = int(full["step_index"])

    def resume_at(self, step_index: int) -> None:
        """The next step is number `step_index`, from 0: masks of dropout go on from there."""
        self.step_index = step_index
