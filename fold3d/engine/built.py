"""Built: what an engine knows once the model has been recorded and cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from fold3d.comms.groups import Groups
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.device import all_rng_untouched
from fold3d.engine import state
from fold3d.engine.pipeline import Pipeline
from fold3d.engine.supervised import Supervised
from fold3d.engine.turns import take_turn
from fold3d.errors import ConfigError, Fold3dError, RankError
from fold3d.faults.failure import is_communication_error
from fold3d.plan.strategy import Strategy
from fold3d.stage.model_chunk import ModelCall
from fold3d.stage.rank_model import RankModel
from fold3d.topology import Topology
from fold3d.trace import Trace


class Built(Supervised):
    """The half of `Engine` that has the model recorded and cut when it is first needed."""

    model: Module
    config: ParallelConfig
    topology: Topology
    device: torch.device
    on_build: list[Callable[[], None]]
    """Called once the model has been cut, with no arguments."""
    planned_memory: int | None
    """Bytes that the planner expects the fullest rank to need; None where it was not asked."""
    _strategy: Strategy | None
    _cut: RankModel | None
    _world: WorldGroup | None
    _closed: bool
    _fallback: Callable[[], Mapping[str, Any] | None]

    def _build(self, example: Mapping[str, Any] | None, call: ModelCall | None = None) -> None:
        raise NotImplementedError

    def _take_turn(self) -> None:
        """Makes the model this engine's, which another one may have used since."""
        take_turn(self, self.model)
        if self._pipeline is not None and self._pipeline.dp_sync is not None:
            self._pipeline.dp_sync.resume()

    def rest(self) -> None:
        """Another engine is about to use the model. Raises: ConfigError between `run` and the optimizer's step."""
        if self._pipeline is not None and self._pipeline.dp_sync is not None:
            self._pipeline.dp_sync.rest()
        if self._cut is not None:
            self._cut.split.remove()  # its next run puts back what it needs

    def meet(self, call: str) -> None:
        """Waits until every rank has come to the same `call`, such as "trainer.save_model()".

        Raises: RankError that names the call when a rank does not come within comm_timeout, or comes to another one.
        """
        if self.topology.world == 1:
            return
        self._built()
        with self._failing_together(f"{call}, which every process must call"):
            try:
                self.world.decide(call, _same_call, timeout=self.config.timeout_seconds)
            except RankError:
                raise
            except Exception as error:
                if not is_communication_error(error):
                    raise
                why = str(error).partition(" (gloo")[0]
                raise _AbsentError(f"every process must call {call}, and not all of them did: {why}") from None

    @property
    def is_built(self) -> bool:
        """Whether the model has been recorded and cut; False after an engine is closed, too."""
        return self._cut is not None

    def _built(
        self, batch: Mapping[str, Any] | None = None, call: ModelCall | None = None
    ) -> tuple[RankModel, Pipeline]:
        if self._failure is not None:
            raise RankError(f"this engine stopped at an earlier failure: {self._failure}")
        if self._closed:
            raise ConfigError("this engine is closed; make a new one, with a new model")
        if self._cut is None:
            if batch is None:
                batch, call = self._fallback(), None
            if batch is None:
                raise ConfigError(
                    "the model has not been recorded yet; pass example=<a micro-batch> to Engine or Trainer, or train "
                    "or evaluate first"
                )
            with all_rng_untouched(self.device):
                self._build(batch, call)
        assert self._cut is not None and self._pipeline is not None
        return self._cut, self._pipeline

    @property
    def trace(self) -> Trace | None:
        """What was recorded of the model; None for one that is not cut where that was of no use, or not possible."""
        return self._built()[0].trace

    @property
    def strategy(self) -> Strategy:
        """What was decided, by the user, by default or by the planner: the same on every rank. It changes between steps
        when the planner, with measured times, finds another schedule or order of gathers that is faster."""
        self._built()
        assert self._strategy is not None
        return self._strategy

    @property
    def owned(self) -> dict[str, Parameter]:
        """Parameters with storage on this rank, by canonical name."""
        return self._built()[0].parameters

    @property
    def primary(self) -> set[str]:
        """Names of the parameters this rank's stage is responsible for: each of the model belongs to one stage."""
        return self._built()[0].primary()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers this rank's stage is responsible for, by name."""
        return state.own_buffers(self._built()[0])

    @property
    def world(self) -> WorldGroup:
        """All ranks of the job, for what they exchange besides steps; all ranks must ask for it the first time."""
        if self._world is None:
            self._world = WorldGroup(self.topology, self.config.timeout_seconds)
        return self._world

    @property
    def groups(self) -> Groups:
        """The groups of this rank: `data`, the replicas of its stage; `pipeline`, the stages of its replica, a process
        group of torch's (None where there is one stage)."""
        return self._built()[1].groups


class _AbsentError(Fold3dError, dist.DistNetworkError):
    """Not all ranks came."""


def _same_call(calls: list[str]) -> None:
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        raise RankError(f"every process must call {calls[0]}, but rank {other} calls {calls[other]}")
