"""Builds what one rank trains with, of the model that was cut: ranks are connected, and chunks with the executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d import _C
from fold3d.comms.connections import (
    PeerHosts,
    connect_replicas,
    connect_shards,
    connect_stages,
    find_hosts,
    join_nic_arbiter,
    uses_tcp,
)
from fold3d.comms.groups import Groups
from fold3d.comms.world_group import WorldGroup
from fold3d.config import text_of_bytes
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.data_parallel.late.each_micro_batch import EachMicroBatch
from fold3d.data_parallel.late.versioned import Predicted
from fold3d.data_parallel.late.without_flush import WithoutFlush
from fold3d.data_parallel.one_replica import OneReplica
from fold3d.data_parallel.transfers import NoReplicas
from fold3d.engine.built import BuiltRank
from fold3d.engine.division import COMPARED, Division
from fold3d.engine.flow import Flow, MicroBatchFlow
from fold3d.engine.pipeline import Pipeline
from fold3d.engine.planning.cut_model import CutModel
from fold3d.engine.planning.memory_limit import LessMemory
from fold3d.engine.planning.replanner import Replanner
from fold3d.engine.step import Step
from fold3d.engine.step_recorder import StepRecorder
from fold3d.errors import Fold3dError, RankError
from fold3d.faults.lifetime import Lifetime
from fold3d.faults.supervisor import Supervisor
from fold3d.observe.announce import announce
from fold3d.observe.memory import MemoryWatch
from fold3d.plan.programs import Programs
from fold3d.plan.space.offload import offloaded_chunks
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.plan.space.tp_overlap import KNOB as TP_OVERLAP
from fold3d.splitting.prove_again import prove_again
from fold3d.stage.loss_reads import ShardReads
from fold3d.stage.model_chunk import OncePerMicroBatch, PartDraws, PipelineChunk
from fold3d.stage.offload import keeper, offload_options
from fold3d.stage.rank_model import RankModel
from fold3d.stage.sharded_chunk import BorderParts, OperatorChecks, ShardedChunk
from fold3d.stage.sub_pipeline import SubPipeline
from fold3d.tensor_parallel.overlap_trial import OverlapTrial
from fold3d.topology import Topology
from fold3d.trace.compound import held, holders, is_compound, parts_of
from fold3d.trace.wrappers import whole_shape

logger = logging.getLogger(__name__)

LATE = (
    "gradient_delay=1: each update takes the gradients of the step before, so losses and weights are not those of "
    "exact training, and some optimizers and learning rates bear it worse than others: see docs/late-gradients.md; "
    "delay_correction={correction!r}"
)
EACH = (
    "weight_versions={rule!r}: an update after each micro-batch, whose gradients are of weights up to {delay} updates "
    "old, so losses and weights are not those of exact training: see docs/late-gradients.md. A stage keeps up to "
    "{most} versions of its weights; this one, the first, keeps {own}, {more} beside the newest"
)


def connect(model: CutModel, supervisor: Supervisor, world: WorldGroup, device: torch.device) -> BuiltRank:
    """Connects this rank with the others, and its chunks with the executor; all ranks of the job call.

    Raises: RankError on all ranks when one fails; then nothing is left open.
    """
    supervisor.open()
    undo = ExitStack()
    topology, planned = world.topology, model.planned
    job, expected = (None, None) if planned is None else (planned[0], planned[1].peaks[topology.pp_rank].bytes)
    less = LessMemory(job=job, strategy=model.strategy, config=model.config, dp=topology.dp, device=device)
    memory = MemoryWatch(device, model.config.memory_size, expected, less.curves, less.changes)
    with supervisor.progress.during("building the engine", meets=True):
        try:
            with memory.explains():
                links = Links.make(model, supervisor, world, device, undo)
                return _built(model, supervisor, links, undo, memory)
        except BaseException as error:
            message = "" if isinstance(error, Fold3dError) else supervisor.fail(error)
            supervisor.close()
            undo.close()
            if isinstance(error, Fold3dError) or not isinstance(error, Exception):
                raise
            raise RankError(message) from error


def _ends_with(one: Any, life: Lifetime, undo: ExitStack) -> None:
    """A failure of the job aborts what communicates; `undo` closes it."""
    life.end_with(one)
    undo.callback(one.close)
    undo.callback(life.forget, one)


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What connects one rank with the others."""

    groups: Groups
    over_tcp: bool
    """Whether messages and sums have connections of fold3d's own."""
    arbiter: _C.NicArbiter
    hosts: PeerHosts
    clock: _C.StreamClock
    makes_room: bool
    """Whether sums of gradients make room for messages."""
    shards: _C.TensorSync | None
    """With the ranks that share this one's weights."""
    rings: _C.BucketSync | NoReplicas

    @classmethod
    def make(
        cls, model: CutModel, supervisor: Supervisor, world: WorldGroup, device: torch.device, undo: ExitStack
    ) -> Links:
        """All ranks of the job call."""
        config, topology, life = model.config, world.topology, supervisor.progress.life
        over_tcp, timeout = uses_tcp(config.transport, device), config.timeout_seconds
        submeshes = model.cut.placement.submeshes()
        groups = Groups(topology, device, timeout, submeshes, with_p2p=not over_tcp, world=world)
        _ends_with(groups, life, undo)
        # Late sums have a whole step; what is gathered is needed first.
        late = config.gradient_delay > 0
        arbiter = join_nic_arbiter(topology, groups, model.name, config.preempt, device, gathers_first=late)
        hosts, clock = find_hosts(groups), _C.StreamClock(device)
        makes_room = topology.dp > 1 and config.preempt and hosts.messages
        shards: _C.TensorSync | None = None
        if topology.tp > 1:
            shards = connect_shards(topology, groups, arbiter, timeout, over_tcp=over_tcp, hosts=hosts)
            _ends_with(shards, life, undo)
        rings: _C.BucketSync | NoReplicas = NoReplicas()
        if topology.dp > 1:
            rings = connect_replicas(
                *(topology, groups, arbiter, device, timeout),
                over_tcp=over_tcp,
                hosts=hosts,
                makes_room=makes_room,
                clock=clock,
            )
        return cls(
            groups=groups, over_tcp=over_tcp, arbiter=arbiter, hosts=hosts, clock=clock, makes_room=makes_room,
            shards=shards, rings=rings,
        )  # fmt: skip


def _built(model: CutModel, supervisor: Supervisor, links: Links, undo: ExitStack, memory: MemoryWatch) -> BuiltRank:
    cut, config, groups, progress, clock = model.cut, model.config, links.groups, supervisor.progress, links.clock
    topology = groups.topology
    way = TP_OVERLAP.of(model.strategy) if topology.tp > 1 else "none"
    overlap = OverlapTrial(way, partial(_slowest, groups.world), model.overlap_limit)
    cut.group.connect(links.shards, lambda: overlap.fuses)
    _share_weights(cut, groups)
    sync = _gradient_sync(model, supervisor, links)
    executor = _executor(model, links, sync, overlap)
    for part in (executor, sync):
        _ends_with(part, progress.life, undo)
    progress.follow(executor)
    undo.callback(progress.follow, None)
    keep = [keeper(executor, cut.model)] if offloaded_chunks(model.strategy) else []
    counting = links.shards if groups.device.type == "cpu" else None  # which hears of tensors in host memory only
    recorder = StepRecorder(executor, sync, links.arbiter, progress, clock, topology.pp_rank, counting)
    undo.callback(recorder.close)
    pipeline = Pipeline(topology, groups, executor, progress, *keep)
    flow: Flow | MicroBatchFlow | None = None
    if isinstance(sync, WithoutFlush):
        flow = Flow(topology, pipeline, sync, recorder, progress)
    elif isinstance(sync, EachMicroBatch):
        flow = MicroBatchFlow(topology, pipeline, sync, recorder, progress)
    step = Step(
        cut=cut,
        groups=groups,
        seed=config.seed,
        pipeline=pipeline,
        sync=sync,
        recorder=recorder,
        replanner=Replanner(
            topology, groups, config, groups.device, model.proposed, has_times=clock.tells_time, resizes=model.resizes
        ),
        overlap=overlap,
        supervisor=supervisor,
        memory=memory,
        division=_division(model, pipeline),
        flow=flow,
    )
    memory.begin([*(part for one in cut.parameters.values() for part in parts_of(one)), *cut.model.buffers()])
    return BuiltRank(
        cut=cut,
        groups=groups,
        sync=sync,
        recorder=recorder,
        step=step,
        supervisor=supervisor,
        memory=memory,
        undo=undo,
    )


def _executor(model: CutModel, links: Links, sync: DpSync | OneReplica, overlap: OverlapTrial) -> _C.Executor:
    cut, config, groups = model.cut, model.config, links.groups
    topology, timeout = groups.topology, config.timeout_seconds
    sharded = None
    if topology.tp > 1:
        assert cut.trace is not None, "what has shards was recorded"
        summed = [name for name in cut.parameters if len(cut.placement.summed_over(name, topology.tp_rank).tp) > 1]
        reads = ShardReads(cut.model, cut.parameters, cut.trace.blocks, summed)
        prove = partial(prove_again, cut.model, cut.trace, cut.parts.plan)
        operators = OperatorChecks(cut.model, cut.operators, prove)
        sharded = partial(_sharded, model, _border_parts(model), reads, overlap, operators)
    peaks = None if model.planned is None else model.planned[1].peaks
    divides = config.micro_batch_size is not None or model.resizes
    return _C.Executor(
        _chunks(model, topology, sync, sharded, PartDraws(cut.model) if divides else None),
        topology.pp_rank,
        topology.pp,
        groups.p2p_names(),
        groups.device,
        timeout,
        topology.describe(topology.rank),
        connect_stages(topology, groups.world, timeout) if links.over_tcp and topology.pp > 1 else None,
        links.arbiter,
        list(links.hosts.stages),
        offload_options(config, model.strategy, 0 if peaks is None else peaks[topology.pp_rank].pool),
        links.clock,
        links.makes_room,
        topology.style,
    )


def _gradient_sync(model: CutModel, supervisor: Supervisor, links: Links) -> DpSync | OneReplica:
    """Returns what sums the gradients of one rank over its replicas, or only delays them."""
    config, cut, groups = model.config, model.cut, links.groups
    topology = groups.topology
    if topology.dp == 1 and not config.gradient_delay:
        return OneReplica(cut, groups, config)
    if topology.dp > 1:
        schedule = BucketSchedule.make(model.buckets, model.strategy, topology.pp_rank)
    else:  # buckets of one replica, which nobody sums
        schedule = BucketSchedule.of(model.buckets, ["serial"] * (1 + len(model.buckets)), ())

    def read() -> None:
        supervisor.progress.life.check()
        with supervisor.together("waiting for the weights of the last step"):
            made.settle()

    made: DpSync  # which `read` finds
    given = (cut, groups, config, links.rings, schedule, links.clock, read)
    if config.updates_each_micro_batch:
        versions = _C.live_versions(config.weight_versions, topology.pp, topology.pp_rank)
        if topology.rank == 0:
            _announce_versions(model, topology.pp, versions)
        made = EachMicroBatch(*given, versions=versions)
        return made
    kind = Predicted if config.delay_correction == "predict" else DpSync if config.flush else WithoutFlush
    made = kind(*given)
    if config.gradient_delay and topology.rank == 0:
        announce(logger, LATE.format(correction=config.delay_correction))
    return made


def _announce_versions(model: CutModel, pp: int, versions: int) -> None:
    """Says how many versions of weights there are, and what they take on this rank."""
    more = text_of_bytes((versions - 1) * sum(p.numel() * p.element_size() for p in model.cut.trainable().values()))
    rule = model.config.weight_versions
    announce(logger, EACH.format(rule=rule, delay=pp - 1, most=pp, own=versions, more=more))


def _division(model: CutModel, pipeline: Pipeline) -> Division | None:
    size, parameters = model.config.part_size, [*model.cut.model.parameters()]
    if size is None and not model.resizes:
        return None

    def in_16_bits() -> bool:
        with model.autocast():
            on = any(torch.is_autocast_enabled(kind) for kind in {one.device.type for one in parameters} - {"meta"})
        return on or any(one.dtype.itemsize == 2 for one in parameters if one.is_floating_point())

    schedule = Programs.of(model.strategy).evaluation(COMPARED)
    reduction = model.config.loss_reduction
    return Division(
        *(size, pipeline, schedule, model.cut.model, reduction),
        in_16_bits=in_16_bits,
        foresees=model.resizes,
    )


def _chunks(
    model: CutModel,
    topology: Topology,
    sync: DpSync | OneReplica,
    sharded: Callable[[int], ShardedChunk] | None,
    draws: PartDraws | None,
) -> list[PipelineChunk]:
    cut = model.cut
    numbers = topology.chunks(model.strategy.segments)
    without_graph = RECOMPUTE.of(model.strategy).without_graph(model.strategy.num_chunks)
    once = None
    repeats = len(numbers) > 1 or any(without_graph[number] for number in numbers)
    if repeats or model.strategy.num_chunks > 1:
        once = OncePerMicroBatch(cut.model, cut.trace.modules if cut.trace else (), repeats=repeats)
    last = model.strategy.num_chunks - 1
    return [
        PipelineChunk(
            *(v, v == last, cut.split, sync, once, None if sharded is None else sharded(v), draws),
            turn_to=sync.turn_to if isinstance(sync, (WithoutFlush, EachMicroBatch)) else None,
            is_end=v == numbers[-1],
            compares=topology.pp * topology.tp > 1,
            own=cut.model.parameters if topology.world > 1 else None,
        )
        for v in numbers
    ]


def _sharded(
    model: CutModel,
    parts: BorderParts | None,
    reads: ShardReads,
    overlap: OverlapTrial,
    operators: OperatorChecks,
    chunk: int,
) -> ShardedChunk:
    cut = model.cut
    sub = SubPipeline(chunk, cut.model, cut.apart, cut.group, shares_sequence=bool(cut.parts.plan.sequence))
    return ShardedChunk(chunk, parts, sub, cut.group.kept, reads, lambda: overlap.in_halves, operators)


def _border_parts(model: CutModel) -> BorderParts | None:
    cut = model.cut
    if model.strategy.num_chunks == 1 or cut.trace is None:
        return None
    widths = {size for parameter in cut.model.parameters() for size in whole_shape(parameter)}
    return BorderParts(cut.trace, cut.ranges, widths, cut.group, cut.parts.plan.sequence)


def _slowest(world: WorldGroup, times: Tensor) -> None:
    world.all_reduce(times, torch.maximum)


def _share_weights(cut: RankModel, groups: Groups) -> None:
    """Replica 0's weights, and of several copies in a replica the first one's, become everybody's."""
    shared = cut.placement.shared(cut.parts.rank)
    plain = {name: parameter for name, parameter in cut.parameters.items() if not is_compound(parameter)}
    for name in sorted(set(shared) & set(plain)):
        places = shared[name]
        dist.broadcast(cut.parameters[name].data, groups.topology.source_of(places), group=groups.ties[places])
    buffers = [b for b in cut.model.buffers() if b.device.type != "meta"]
    compound = [tensor for _, module in holders(cut.model) for tensor in held(module)]
    for tensor in [*(parameter.data for parameter in plain.values()), *buffers, *compound]:
        groups.data.broadcast(tensor, timeout=groups.world.patience)
