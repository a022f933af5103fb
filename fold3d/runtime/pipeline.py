"""Pipeline: one rank's groups, chunks, C++ executor and failure board; runs schedules."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.plan import Plan
from fold3d.runtime import gradients
from fold3d.runtime.account import Account, make_account
from fold3d.runtime.broadcast import broadcast_value
from fold3d.runtime.chunk import DropoutKey, MicroBatch, ModelCall, PipelineChunk, StepInputs
from fold3d.runtime.failure import FailureBoard
from fold3d.runtime.gradients import GradientBuffer
from fold3d.runtime.groups import Groups
from fold3d.runtime.rank_model import RankModel
from fold3d.runtime.tcp import connect_stages
from fold3d.schedule import Schedule
from fold3d.topology import Topology

_numbers = itertools.count()  # engines of one process, made in the same order on every rank

_CAUSE_SECONDS = 2.0
"""How long a rank whose communication broke waits for the rank that failed to say why."""


class Pipeline:
    """Runs lowered schedules on one rank. Made and used by all ranks of the job in the same order."""

    def __init__(self, cut: RankModel, config: ParallelConfig, topology: Topology, device: torch.device, plan: Plan):
        self._cut = cut
        self._topology = topology
        self._last_stage = topology.pp_rank == topology.pp - 1
        self._name = f"rank {topology.rank} (replica {topology.dp_rank}, stage {topology.pp_rank})"
        shared = cut.cells.shared_stages()
        over_tcp = topology.pp > 1 and _uses_tcp(config.transport, device)
        self.groups = Groups(topology, device, config.timeout_seconds, shared.values(), with_links=not over_tcp)
        self._board: FailureBoard | None = None
        if topology.world > 1:
            self._compare_plans(plan)
            store = dist.distributed_c10d._get_default_store()
            self._board = FailureBoard(store, f"{plan.digest()}/{next(_numbers)}", topology.rank, self._on_failure)
        self._tied = {
            name: (cut.parameters[name], self.groups.ties[stages])
            for name, stages in shared.items()
            if topology.pp_rank in stages and cut.parameters[name].requires_grad
        }
        self._share_weights(shared)
        self._inputs = StepInputs()
        self._buffers: list[GradientBuffer] = []
        chunks = [self._make_chunk(v, v == config.num_chunks - 1) for v in topology.chunks(config.segments)]
        self._executor = _C.Executor(
            chunks,
            topology.pp_rank,
            topology.pp,
            self.groups.link_names(),
            device,
            config.timeout_seconds,
            self._name,
            connect_stages(topology, self.groups.pipeline, config.timeout_seconds) if over_tcp else None,
        )
        self._bounds = (0, 0)
        self._records: list[Any] = []

    def _make_chunk(self, index: int, is_last: bool) -> PipelineChunk:
        buffer = None
        if self._topology.dp > 1:
            buffer = GradientBuffer(self._cut.of_chunk(index))
            self._buffers.append(buffer)
        return PipelineChunk(index, is_last, self._cut.model, self._cut.split, self._inputs, buffer)

    def _compare_plans(self, plan: Plan) -> None:
        digests: list[Any] = [None] * self._topology.world
        dist.all_gather_object(digests, plan.digest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise ConfigError(
                f"ranks {different} have another plan than rank 0 (hashes {digests}); start every process with the "
                "same script, arguments and library versions"
            )

    def _share_weights(self, shared: dict[str, tuple[int, ...]]) -> None:
        """Replica 0's weights, and of copies in several stages the first stage's, become everybody's."""
        for name in sorted(set(shared) & set(self._cut.parameters)):
            group = self.groups.ties[shared[name]]
            source = self._topology.rank_of(self._topology.dp_rank, shared[name][0])
            dist.broadcast(self._cut.parameters[name].data, source, group=group)
        if self.groups.data is None:
            return
        source = self._topology.rank_of(0, self._topology.pp_rank)
        buffers = [b for b in self._cut.model.buffers() if b.device.type != "meta"]
        for tensor in [*(p.data for p in self._cut.parameters.values()), *buffers]:
            dist.broadcast(tensor, source, group=self.groups.data)

    def train(
        self, schedule: Schedule, micro_batches: list[MicroBatch], call: ModelCall, keys: list[DropoutKey]
    ) -> torch.Tensor:
        """Runs one step's forwards, backwards and gradient sums; returns the replica's loss on each of its ranks."""
        self._inputs.set(micro_batches, call, list(keys))
        losses = self._run(schedule, backward=True)
        for buffer in self._buffers:
            buffer.average(self._topology.dp)
        gradients.sum_tied(self._tied)
        return self._replica_loss(losses)

    def _replica_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        # Summed in fp64: many small shares add up to one number that is compared over layouts.
        total = torch.zeros((), dtype=torch.float64)
        if self._last_stage:
            total = torch.stack([value.double().reshape(()) for value in losses]).sum().cpu()
        if self.groups.pipeline is not None:
            source = self._topology.rank_of(self._topology.dp_rank, self._topology.pp - 1)
            dist.broadcast(total, source, group=self.groups.pipeline)
        return total.to(torch.get_default_dtype())

    def evaluate(self, schedule: Schedule, batch: MicroBatch, call: ModelCall) -> Any:
        """Runs one batch forward; returns the last chunk's result on every rank of the replica."""
        self._inputs.set([batch], call, [None])
        results = self._inputs.results
        self._run(schedule, backward=False)
        if self.groups.pipeline is None:
            return results[0]
        source = self._topology.rank_of(self._topology.dp_rank, self._topology.pp - 1)
        return broadcast_value(results[0], source, self.groups.pipeline)

    def _run(self, schedule: Schedule, backward: bool) -> list[torch.Tensor]:
        start = time.monotonic_ns()
        try:
            return list(self._executor.run(schedule, self._topology.pp_rank, backward))
        finally:
            self._inputs.clear()
            self._bounds = (start, time.monotonic_ns())
            self._records = [*self._executor.take_spans(), *self._executor.take_records()]

    def account(self) -> Account:
        """Returns where the time of the last run went."""
        return make_account(self._records, *self._bounds)

    def fail(self, error: BaseException) -> str:
        """Ends communication, tells the other ranks, returns the message that every rank raises."""
        action = self._executor.current_action()
        communication = isinstance(error, (_C.CommError, dist.DistError)) or "gloo" in str(error).lower()
        message = None
        if self._board is not None and communication:
            message = self._board.cause(_CAUSE_SECONDS)
        if message is None:
            where = f" in {action}" if action and not isinstance(error, _C.CommError) else ""
            message = f"{self._name} failed{where}: {type(error).__name__}: {error}"
            if self._board is not None:
                self._board.publish(message)
                message = self._board.cause(0) or message
        self._executor.abort(message)
        return message

    def _on_failure(self, message: str) -> None:
        self._executor.abort(message)

    def close(self) -> None:
        """Ends the executor's threads and destroys the groups."""
        if self._board is not None:
            self._board.close()
        self._executor.close()
        self.groups.close()


def _uses_tcp(transport: str, device: torch.device) -> bool:
    if transport == "tcp" and device.type != "cpu":
        raise ConfigError('transport="tcp" moves host memory, but parameters are on a GPU; use "c10d" or "auto"')
    return transport == "tcp" or (transport == "auto" and device.type == "cpu")
