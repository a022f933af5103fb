"""Pipeline: one rank's groups, chunks, C++ executor and failure board; runs schedules."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.comms import abortable_collectives
from fold3d.comms.broadcast import broadcast_value
from fold3d.comms.consistency import check_same_batch, fingerprint
from fold3d.comms.groups import Groups
from fold3d.comms.rings import Hosts, connect_replicas, find_hosts, join_nic_arbiter
from fold3d.comms.tcp import connect_stages, uses_tcp
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.engine.loss import one_number
from fold3d.engine.replanner import Replanner
from fold3d.errors import Fold3dError, RankError
from fold3d.faults.failure import FailureBoard, is_communication_error
from fold3d.faults.interrupt import INTERRUPTED, end_with_a_line, swallow_repeats
from fold3d.faults.progress import Report
from fold3d.faults.stall import holding_up
from fold3d.observe.step_breakdown import MEET, NS_PER_MS, RawRecord, StepBreakdown, make_breakdown
from fold3d.placement.bucket_layout import bucket_layout
from fold3d.plan.job import Job
from fold3d.plan.proposal import Proposal
from fold3d.plan.strategy import Strategy
from fold3d.schedule import Schedule
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.model_chunk import DropoutKey, ModelCall, PipelineChunk, StepInputs
from fold3d.stage.part_hooks import PartHooks
from fold3d.stage.rank_model import RankModel
from fold3d.topology import Submesh

_CAUSE_SECONDS = 0.5
"""How long a rank whose communication broke waits for the rank that failed to say why, before it looks around."""
_SILENT_SECONDS = 2.0
"""How long it then looks who still reports; four reports' time."""
_NAMED = 4
"""How many ranks that are late a message names."""
_ALL_RANKS = 64
"""In larger jobs a rank asks only for the reports of those it talks to."""


class Pipeline:
    """Runs lowered schedules on one rank. Made and used by all ranks of the job in the same order."""

    def __init__(
        self,
        cut: RankModel,
        config: ParallelConfig,
        strategy: Strategy,
        world: WorldGroup,
        device: torch.device,
        name: str,
        proposed: tuple[Job, Proposal] | None,
        *,
        read: Callable[[], None],
    ):
        """Args:
        name: this engine's in the job, the same on every rank.
        proposed: what the planner was told and said, if `tune` may choose another schedule.
        read: makes weights complete for whoever reads them, and tells of failures.
        """
        self._read = read
        self._cut = cut
        self._world = world
        self._topology = topology = world.topology
        self._name = topology.describe(topology.rank)
        self._job = name
        self._closed = False
        self._bounds = (0, 0)
        self._records: list[RawRecord] = []
        self._inputs = StepInputs()
        self._part_hooks = PartHooks(cut.parameters, cut.placement.readers, cut.replaced())
        self._loss_check = cut.loss_check()
        self.dp_sync: DpSync | None = None
        self._schedule: Schedule | None = None
        self._replanner: Replanner | None = None
        self._trained = False  # the last run was a step
        self._gradients_read = False  # its gradients may have been changed
        self._arbiter: _C.NicArbiter | None = None
        self._counted: dict[str, int] = {}  # by the arbiter before the last run
        self._executor: _C.Executor | None = None
        self._groups: Groups | None = None
        self.progress = world.progress
        self._board: FailureBoard | None = None
        if topology.world > 1:
            store = dist.distributed_c10d._get_default_store()
            end_with_a_line(self._name)
            self._board = FailureBoard(store, name, topology, config.silence_seconds, self.progress)
        with self.progress.during("building the engine", meets=True):
            try:
                self._connect(config, strategy, device, proposed)
            except Fold3dError:
                self.close()
                raise
            except BaseException as error:
                message = self.fail(error)
                self.close()
                if not isinstance(error, Exception):
                    raise
                raise RankError(message) from error

    def _connect(
        self,
        config: ParallelConfig,
        strategy: Strategy,
        device: torch.device,
        proposed: tuple[Job, Proposal] | None,
    ) -> None:
        topology, cut = self._topology, self._cut
        shared = cut.placement.shared()
        over_tcp = uses_tcp(config.transport, device)
        timeout = config.timeout_seconds
        self._groups = groups = Groups(
            topology, device, timeout, shared.values(), with_p2p=not over_tcp, world=self._world
        )
        self._tied = {
            name: (cut.parameters[name], groups.ties[places])
            for name, places in shared.items()
            if topology.holds(places) and cut.parameters[name].requires_grad
        }
        self._share_weights(shared)
        self._replanner = Replanner(topology, groups, config, device, proposed)
        self._arbiter = arbiter = join_nic_arbiter(topology, groups, self._job, config.preempt)
        self._counted = arbiter.counters()
        hosts = find_hosts(groups)
        if topology.dp > 1:
            self._connect_replicas(config, strategy, arbiter, hosts, device, over_tcp)
        self._executor = self.progress.executor = _C.Executor(
            [self._make_chunk(v, v == strategy.num_chunks - 1) for v in topology.chunks(strategy.segments)],
            topology.pp_rank,
            topology.pp,
            groups.p2p_names(),
            device,
            timeout,
            self._name,
            connect_stages(topology, groups.world, timeout) if over_tcp and topology.pp > 1 else None,
            arbiter,
            list(hosts.stages),
        )

    def _connect_replicas(
        self,
        config: ParallelConfig,
        strategy: Strategy,
        arbiter: _C.NicArbiter,
        hosts: Hosts,
        device: torch.device,
        over_tcp: bool,
    ) -> None:
        topology, cut = self._topology, self._cut
        stage, least = topology.pp_rank, strategy.bucket_bytes
        buckets = bucket_layout(cut.trainable(), cut.placement, cut.trace, cut.ranges, stage, least)
        plan = BucketSchedule.make(buckets, strategy, stage)
        sync = connect_replicas(
            topology, self.groups, arbiter, device, config.timeout_seconds, over_tcp=over_tcp, hosts=hosts
        )
        self.dp_sync = DpSync(cut, topology, self.groups, sync, plan, self.progress, self._read)
        self.progress.dp_sync = self.dp_sync

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank: a step that failed then leaves nobody in the middle of it."""
        return self._board is None

    @property
    def groups(self) -> Groups:
        """This rank's process groups."""
        assert self._groups is not None
        return self._groups

    def _make_chunk(self, index: int, is_last: bool) -> PipelineChunk:
        return PipelineChunk(
            index,
            is_last,
            self._cut.model,
            self._cut.split,
            self._inputs,
            self.dp_sync,
            is_alone=self._cut.placement.pp == len(self._cut.ranges),
        )

    def _share_weights(self, shared: dict[str, Submesh]) -> None:
        """Replica 0's weights, and of several copies in a replica the first one's, become everybody's."""
        for name in sorted(set(shared) & set(self._cut.parameters)):
            group = self.groups.ties[shared[name]]
            dist.broadcast(self._cut.parameters[name].data, self._topology.source_of(shared[name]), group=group)
        buffers = [b for b in self._cut.model.buffers() if b.device.type != "meta"]
        for tensor in [*(p.data for p in self._cut.parameters.values()), *buffers]:
            self.groups.data.broadcast(tensor, timeout=self._world.patience)

    def train(
        self,
        schedule: Schedule,
        micro_batches: list[MicroBatch],
        call: ModelCall,
        keys: list[DropoutKey],
        *,
        reads_weights: bool,
        reads_gradients: bool,
    ) -> torch.Tensor:
        """Runs one step's forwards, backwards and gradient sums; returns the replica's loss on each of its ranks."""
        self._begin_breakdown()
        self._part_hooks.look()
        if self._loss_check is not None:
            self._loss_check.look(call, micro_batches[0])
        self._gradients_read = reads_gradients
        if reads_weights and self.dp_sync is not None:
            self.dp_sync.flush()
        self._inputs.set(micro_batches, lambda model, batch: one_number(call(model, batch)), list(keys))
        sync = self.dp_sync
        if sync is not None:
            sync.begin(len(micro_batches), schedule.reduce_order(self._topology.pp_rank), whole=reads_gradients)
        losses = self._run(schedule, backward=True)
        if sync is not None:
            sync.end()
        if sync is None or sync.optimizer is None:
            gradients.sum_tied(self._tied)
        # Summed in fp64: many small shares add up to one number that is compared over layouts.
        loss = torch.zeros((), dtype=torch.float64)
        if self._topology.is_last_stage:
            loss = torch.stack([value.double().reshape(()) for value in losses]).sum().cpu()
        return self._meet(loss, micro_batches).to(torch.get_default_dtype())

    def share_tied_gradients(self, *_: Any) -> None:
        """Gives the copies of tied weights the first stage's gradients, if others may have changed them; for dp = 1."""
        if not self._gradients_read:
            return
        for name, (parameter, group) in sorted(self._tied.items()):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            used = [parameter.grad is not None]
            source = self._topology.source_of(self._cut.placement.summed_over(name))
            gradients.share_first(gradient, used, source, group)
            parameter.grad = gradient if used[0] else None

    def _meet(self, value: torch.Tensor, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Returns the sum of `value`, fp64 scalar, over the stages, once all of them had the same micro-batches."""
        if self.groups.pipeline is None:
            return value
        shares = torch.zeros(1 + self._topology.pp, dtype=torch.float64)
        shares[0], shares[1 + self._topology.pp_rank] = value, fingerprint(micro_batches)
        abortable_collectives.all_reduce(shares, self.groups.pipeline, self.progress)
        check_same_batch(self._topology, [int(one) for one in shares[1:].tolist()])
        return shares[0]

    def evaluate(self, schedule: Schedule, batch: MicroBatch, call: ModelCall) -> Any:
        """Runs one batch forward; returns the last chunk's result on every rank of the replica."""
        self._begin_breakdown()
        if self._loss_check is not None:
            self._loss_check.look(call, batch)
        if self.dp_sync is not None:
            self.dp_sync.flush()
        self._trained = False
        self._inputs.set([batch], call, [None])
        results = self._inputs.results
        self._run(schedule, backward=False)
        if self.groups.pipeline is None:
            return results[0]
        self._meet(torch.zeros((), dtype=torch.float64), [batch])
        source = self._topology.rank_of(self._topology.dp_rank, self._topology.pp - 1)
        return broadcast_value(results[0], source, self.groups.pipeline)

    def _run(self, schedule: Schedule, backward: bool) -> list[torch.Tensor]:
        assert self._executor is not None
        self._schedule = schedule
        self.progress.begin(schedule.micro_batches)
        try:
            with self.progress.during(self.progress.doing):  # whom an action waits for follows from the schedule
                return list(self._executor.run(schedule, self._topology.pp_rank, backward))
        finally:
            self._inputs.clear()
            self.extend()

    def _begin_breakdown(self) -> None:
        """A run begins; what is still recorded of the one before, nobody asked for."""
        self._take_records()
        self._records = []
        assert self._arbiter is not None
        self._counted = self._arbiter.counters()
        self._bounds = (time.monotonic_ns(),) * 2

    def _take_records(self) -> list[RawRecord]:
        if self._closed:
            return []
        assert self._executor is not None
        own = [*self._executor.take_spans(), *self._executor.take_records()]
        own += [("wait", MEET, start, end, 0) for start, end in self.progress.met]
        self.progress.met.clear()
        return own if self.dp_sync is None else own + self.dp_sync.take_records()

    def extend(self) -> None:
        """What happened since the breakdown began, or was extended, belongs to its step."""
        self._bounds = (self._bounds[0], time.monotonic_ns())
        self._records += self._take_records()

    def _extend_by_waits(self) -> None:
        """Whoever read weights after the step waited for its DP.sync; what else they did is not the step's."""
        start, end = self._bounds
        later = [record for record in self._take_records() if record[:2] != ("wait", MEET) or record[2] < end]
        waited = sum(stop - begin for lane, _, begin, stop, _ in later if lane == "wait" and begin >= end)
        self._bounds = (start, end + waited)
        self._records += later

    def breakdown_later(self) -> Callable[[], StepBreakdown]:
        """Returns what makes the breakdown of where the time of the last step went, at any later time."""
        self._extend_by_waits()
        expected = self._replanner.believed if self._replanner is not None else None
        assert self._arbiter is not None
        arbiter = {name: count - self._counted[name] for name, count in self._arbiter.counters().items()}
        step_ms, predicted = None, None
        if expected is not None:
            step_ms, predicted = expected.step_ms, expected.stages[self._topology.pp_rank]
        return partial(make_breakdown, tuple(self._records), *self._bounds, step_ms, arbiter, predicted)

    def tune(self, strategy: Strategy, schedule: Schedule) -> Strategy | None:
        """Looks at the step before the one that begins; every so often plans anew. All ranks of the job call.

        Returns: a better strategy, to be used from now on; its order of gathers is in use already.
        """
        assert self._replanner is not None
        if self._trained:
            self._extend_by_waits()
            self._replanner.observe(self._records, (self._bounds[1] - self._bounds[0]) / NS_PER_MS)
        self._trained = True
        if not self._replanner.is_due:
            return None
        with self.progress.during("planning from measured times", meets=True):
            better = self._replanner.look(strategy, schedule, self.dp_sync)
        if better is not None and better.gather_order and self.dp_sync is not None:
            self.dp_sync.reschedule(better.gather_order[self._topology.pp_rank])
        return better

    # Failures

    def fail(self, error: BaseException) -> str:
        """Ends communication, tells the other ranks, returns the message that every rank raises."""
        if self._board is None:
            return self._own_message(error)
        if isinstance(error, KeyboardInterrupt):
            swallow_repeats()
        message = self._board.cause(0)
        if message is None:
            message = self._diagnose(error) if is_communication_error(error) else self._own_message(error)
            message = self._board.publish(message)
        self.progress.abort(message)
        self._board.raised()
        return message

    def failure(self) -> str | None:
        """Returns the job's first failure if another rank has told of one."""
        return None if self._board is None else self._board.cause(0)

    def _own_message(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return f"{self._name} {INTERRUPTED} {self.progress.report().where()}"
        return f"{self._name} failed {self.progress.report().where()}: {type(error).__name__}: {error}"

    def _diagnose(self, error: BaseException) -> str:
        """Returns the cause of broken communication: what another rank told, else who is silent, else who is late."""
        assert self._board is not None
        topology = self._topology
        peers = {*topology.pipeline(topology.dp_rank), *topology.replicas(topology.pp_rank)}
        ranks = range(topology.world) if topology.world <= _ALL_RANKS else sorted(peers)
        told = self._board.cause(_CAUSE_SECONDS)
        before = {} if told else self._board.reports(ranks)
        told = told or self._board.cause(_SILENT_SECONDS)
        if told:
            return told
        reports = self._board.reports(ranks)
        silent = [r for r in reports if r in before and reports[r].beat == before[r].beat and r != topology.rank]
        found = [f"{topology.describe(r)} is dead or stopped, last seen {reports[r].where()}" for r in silent]
        if not found:
            found = self._uneven(reports)
        if not found:
            late = self._late(reports)
            found = [
                f"{topology.describe(r)} does not come in time (setting comm_timeout): it is {reports[r].where()}"
                for r in late[:_NAMED]
            ]
        if not found:
            return self._own_message(error)
        noticed = str(error).removeprefix(f"{self._name}: ").removeprefix(f"{self._name} ")
        return f"{'; '.join(found)}. Noticed by {self._name} {self.progress.report().where()}: {noticed}"

    def _uneven(self, reports: dict[int, Report]) -> list[str]:
        """Returns what is wrong with runs of different length, which cannot fit together."""
        own = self.progress.report()
        stages = [r for r in self._topology.pipeline(self._topology.dp_rank) if r in reports]
        return [
            f"{self._topology.describe(r)} was given {reports[r].micro_batches} micro-batches and {self._name} "
            f"{own.micro_batches}: all stages of a replica must get the same number"
            for r in stages
            if reports[r].run == own.run and reports[r].micro_batches != own.micro_batches
        ][:1]

    def _late(self, reports: dict[int, Report]) -> list[int]:
        """Returns the ranks this one waited for in vain."""
        if self._schedule is None:
            return []
        reports = reports | {self._topology.rank: self.progress.report()}
        return holding_up(self._schedule, self._topology, self.progress.run, reports)

    def close(self) -> None:
        """Ends the executor's threads and destroys the groups, once the weights are final."""
        self._closed, self._gradients_read = True, False
        if self.dp_sync is not None and self.progress.aborted is None:
            self.dp_sync.finish()
        if self._board is not None:
            self._board.close()
        self.progress.executor = self.progress.dp_sync = None
        if self.dp_sync is not None:
            self.dp_sync.close()
        if self._executor is not None:
            self._executor.close()
        if self._groups is not None:
            self._groups.close()
