"""Builds what one rank trains with: the model is recorded, planned and cut, then the ranks are connected."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fold3d import _C
from fold3d.comms.consistency import agree
from fold3d.comms.groups import Groups
from fold3d.comms.rings import connect_replicas, connect_shards, find_hosts, join_nic_arbiter
from fold3d.comms.tcp import connect_stages, uses_tcp
from fold3d.comms.world_group import WorldGroup
from fold3d.config import AUTO, GRAPH, ParallelConfig
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.data_parallel.one_replica import OneReplica
from fold3d.data_parallel.optimizer.kernel_checks import check_built
from fold3d.engine.built import BuiltRank
from fold3d.engine.division import COMPARED, Division, number_of_parts, why_not_divided
from fold3d.engine.pipeline import Pipeline
from fold3d.engine.planning import planner
from fold3d.engine.planning.agreed_graph import agreed_graph
from fold3d.engine.planning.less_memory import LessMemory
from fold3d.engine.planning.memory_limit import memory_limit
from fold3d.engine.planning.replanner import Replanner
from fold3d.engine.planning.tp_forecast import TpForecast, forecast_of, predict_tp_sync, warn_of_spread
from fold3d.engine.step import Step
from fold3d.engine.step_recorder import StepRecorder
from fold3d.errors import ConfigError, Fold3dError, RankError, TraceError
from fold3d.faults.supervisor import Supervisor
from fold3d.observe.announce import announce
from fold3d.observe.memory import MemoryWatch
from fold3d.placement.bucket_layout import bucket_layout
from fold3d.placement.partition import split_ranges
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.programs import Programs
from fold3d.plan.proposal import Proposal
from fold3d.plan.resolve import needs_planner, unplanned
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.plan.space.tp_overlap import KNOB as TP_OVERLAP
from fold3d.plan.strategy import Ranges, Strategy
from fold3d.sharding.shard import even_part
from fold3d.stage.micro_batch import ModelCall
from fold3d.stage.model_chunk import PipelineChunk
from fold3d.stage.offload import check_folder, check_pool, keeper, offload_options, prove_room, refuse_without_effect
from fold3d.stage.once.once_per_micro_batch import OncePerMicroBatch
from fold3d.stage.once.part_draws import PartDraws
from fold3d.stage.rank_model import RankModel, arguments_of, record
from fold3d.stage.sharded.border_parts import BorderParts
from fold3d.stage.sharded.shard_reads import ShardReads
from fold3d.stage.sharded.sharded_chunk import ShardedChunk
from fold3d.stage.sharded.sub_pipeline import SubPipeline
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.kept.kept_sums import KeptSums
from fold3d.tensor_parallel.sub_pipelined.overlap_trial import OverlapTrial
from fold3d.tensor_parallel.sub_pipelined.turning_ops import TurningOps
from fold3d.tensor_parallel.sub_pipelined.turns import Turns
from fold3d.topology import Topology
from fold3d.trace.example import part_of, samples_of
from fold3d.trace.wrappers import whole_shape

logger = logging.getLogger(__name__)

_numbers = itertools.count()  # of the engines of one process


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the user wants built."""

    model: Module
    config: ParallelConfig
    constraints: Constraints
    """From `resolve_auto`."""
    topology: Topology
    device: torch.device
    optimizer: Callable[[list[Parameter]], Optimizer] | None
    """Makes one like the training's, for the planner to try."""
    autocast: Callable[[], AbstractContextManager[Any]]
    weights: str | None
    """Folder with safetensors."""
    compile_options: Mapping[str, Any] | None = None
    """Of torch.compile, for each block; None: blocks are not compiled."""

    @property
    def plans(self) -> bool:
        """Whether the planner decides anything."""
        limited = memory_limit(self.config, self.device) is not None
        return needs_planner(self.config, self.constraints, self.topology.dp, limited=limited)

    @property
    def records(self) -> bool:
        """Whether a recording is of use: to cut the model or its layers, or to know which layer waits for which
        parameters."""
        several = max(self.config.pp * (self.constraints.segments or 1), self.config.tp, self.topology.dp) > 1
        return self.plans or several


@dataclass(frozen=True, kw_only=True, slots=True)
class CutModel:
    """The model, cut as the user or the planner wants it; the same strategy on all ranks."""

    cut: RankModel
    config: ParallelConfig
    strategy: Strategy
    proposed: tuple[Job, Proposal] | None
    """What the planner was told and said, if another schedule may be chosen."""
    planned: tuple[Job, Proposal] | None
    """What the planner was told and said; None where it was not asked."""
    overlap_limit: float | None
    """Seconds of a step's forwards and backwards from which the predicted way of hiding TP.sync is doubted; None: it
    was not predicted."""
    name: str
    """This engine's in the job."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """What the training puts around layers."""


def cut_model(
    order: Order, world: WorldGroup, example: Mapping[str, Any] | None, call: ModelCall | None = None
) -> CutModel:
    """Records the model, plans what is "auto", and cuts the model in place; all ranks of the job call.

    Args:
        example: a micro-batch to record with; None: what the model makes up by itself, if it does.
        call: how the loss function calls the model with it; None: `example` is what the model's forward takes.
    Raises: TraceError, ConfigError; RankError when another rank failed.
    """
    model, config, constraints, topology = order.model, order.config, order.constraints, order.topology
    error: Exception | None = None
    try:
        check_folder(config)
    except ConfigError as own:
        error = own
    samples = planner.UNKNOWN
    if config.part_size is not None and example is not None:
        config, example = _divided(config, example, world)
    if order.records and example is not None and error is None:
        try:
            given, example = example, _called(order, example, call)
            samples = _samples(order, given, call)
        except Exception as own:
            error = own
    digest, number = "", next(_numbers)
    recording = proposed = strategy = sharding = None
    if order.records and error is None:
        try:
            found = record(model, config, example)
            recording = None if found is None else found.under(config.tp)
        except Exception as own:
            error = own
    if config.partition == GRAPH and topology.dp > 1 and order.records:
        agree(world, "", number, error)
        assert recording is not None, "a graph is cut or refused"
        try:
            recording = agreed_graph(model, recording, world, example)
        except TraceError as own:
            error = own
    if config.tp > 1:
        agree(world, "", number, error)
        assert recording is not None, "what has shards was recorded"
        sharding = planner.shard_alike(model, recording, config, world, example)
    if order.plans and error is None:
        proposed = planner.resolve_auto(
            *(model, recording, config, constraints, world, order.device, example),
            *(order.optimizer, order.autocast, number, sharding, samples),
        )
        if proposed is None:  # nothing can be cut
            constraints = replace(constraints, segments=1)
        else:
            strategy = proposed[1].strategy
    if config.micro_batch_size == AUTO:  # decided: from here on it is a number, or nothing
        size = None if proposed is None else proposed[1].micro_batch_size
        number_of = config.micro_batches if strategy is None else strategy.micro_batches
        config = replace(config, micro_batch_size=size, micro_batches=number_of)
    ranges: Ranges = ((0, 0),)
    forecast: TpForecast | None = None if proposed is None or sharding is None else forecast_of(*proposed)
    try:
        if error is not None:
            raise error
        if strategy is None and recording is not None:
            ranges = tuple(split_ranges(recording, config.pp * (constraints.segments or 1)))
    except Exception as own:
        error = own
    if topology.dp > 1 and strategy is None:  # replicas have recorded micro-batches of different sizes
        agree(world, "", number, error)
        ranges = world.share(ranges, timeout=world.patience)
    if sharding is not None:
        agree(world, "", number, error)
        assert recording is not None, "what has shards was recorded"
        if strategy is None:
            strategy, forecast = predict_tp_sync(
                *(model, recording, config, unplanned(config, constraints, topology.dp, ranges), world),
                *(order.device, example, order.autocast, sharding),
            )
        warn_of_spread(forecast, world)
    cut: RankModel | None = None
    try:
        if error is not None:
            raise error
        if strategy is None:
            strategy = unplanned(config, constraints, topology.dp, ranges)
        refuse_without_effect(config, decided=proposed is not None and proposed[0].pool_is_elsewhere)
        check_pool(config, strategy, 0 if proposed is None else max(peak.pool for peak in proposed[1].peaks))
        prove_room(config, strategy, model, recording, example, order.device, order.autocast, sharding)
        check_built(config.kernels, order.device)
        cut = RankModel(
            *(model, config, strategy, topology, order.device, recording, order.weights, sharding),
            compile_options=order.compile_options,
        )
        blocks = recording.blocks if recording else ()
        schedule = Programs.of(strategy).compute(config.micro_batches).csv()
        digest = strategy.digest(repr(config), ",".join(blocks), schedule, sharding.digest if sharding else "")
    except Exception as own:
        error = own
    try:
        name = f"{digest}/{agree(world, digest, number, error)}"
    except BaseException:
        if cut is not None:
            cut.remove()
        raise
    assert cut is not None and strategy is not None
    # What the user has fixed stays fixed, so a schedule of theirs is never exchanged.
    may_change = constraints.schedule is None and constraints.group_size is None
    return CutModel(
        cut=cut,
        config=config,
        strategy=strategy,
        proposed=proposed if may_change else None,
        planned=proposed,
        overlap_limit=None if forecast is None else forecast.other,
        name=name,
        autocast=order.autocast,
    )


def connect(model: CutModel, supervisor: Supervisor, world: WorldGroup, device: torch.device) -> BuiltRank:
    """Connects this rank with the others, and its chunks with the executor; all ranks of the job call.

    Raises: RankError on all ranks when one fails; then nothing is left open.
    """
    store = dist.distributed_c10d._get_default_store() if world.topology.world > 1 else None
    supervisor.open(store, model.name, model.config.silence_seconds)
    undo = ExitStack()
    topology, planned = world.topology, model.planned
    job, expected = (None, None) if planned is None else (planned[0], planned[1].peaks[topology.pp_rank].bytes)
    less = LessMemory(job=job, strategy=model.strategy, config=model.config, dp=topology.dp, device=device)
    memory = MemoryWatch(device, model.config.memory_size, expected, less.curves)
    with supervisor.progress.during("building the engine", meets=True):
        try:
            with memory.explains(less.changes):
                return _connect(model, supervisor, world, device, undo, memory, less)
        except BaseException as error:
            message = "" if isinstance(error, Fold3dError) else supervisor.fail(error)
            supervisor.close()
            undo.close()
            if isinstance(error, Fold3dError) or not isinstance(error, Exception):
                raise
            raise RankError(message) from error


def _connect(
    model: CutModel,
    supervisor: Supervisor,
    world: WorldGroup,
    device: torch.device,
    undo: ExitStack,
    memory: MemoryWatch,
    less: LessMemory,
) -> BuiltRank:
    cut, config, topology, progress = model.cut, model.config, world.topology, supervisor.progress
    over_tcp, timeout = uses_tcp(config.transport, device), config.timeout_seconds
    groups = Groups(topology, device, timeout, cut.placement.submeshes(), with_p2p=not over_tcp, world=world)
    progress.life.end_with(groups)
    undo.callback(groups.close)
    undo.callback(progress.life.forget, groups)
    arbiter = join_nic_arbiter(topology, groups, model.name, config.preempt, device)
    hosts, clock = find_hosts(groups), _C.StreamClock(device)
    shards: _C.TensorSync | None = None
    if topology.tp > 1:
        shards = connect_shards(topology, groups, arbiter, timeout, over_tcp=over_tcp, hosts=hosts)
        progress.life.end_with(shards)
        undo.callback(shards.close)
        undo.callback(progress.life.forget, shards)
    group = TensorParallelGroup(shards)
    way = TP_OVERLAP.of(model.strategy) if topology.tp > 1 else "none"
    overlap = OverlapTrial(way, partial(_slowest, world), model.overlap_limit)
    turning = TurningOps(group, Turns(), lambda: overlap.fuses)
    sums = KeptSums(turning, turning.turns)
    if topology.tp > 1:
        cut.connect(sums)
    _share_weights(cut, groups)
    sync: DpSync | OneReplica
    kernels = config.kernels == "fold3d"
    if topology.dp > 1:
        rings = connect_replicas(
            *(topology, groups, arbiter, device, timeout),
            over_tcp=over_tcp,
            hosts=hosts,
            preempt=config.preempt,
            clock=clock,
        )

        def read() -> None:
            progress.life.check()
            with supervisor.together("waiting for the weights of the last step"):
                dp_sync.settle()

        schedule = _bucket_schedule(model, topology.pp_rank)
        wire = torch.bfloat16 if config.dp_sync_dtype == "bfloat16" else torch.float32
        sync = dp_sync = DpSync(
            *(cut, topology, groups, rings, schedule, progress, clock, read),
            *(config.offload_optimizer, kernels, wire),
        )
    else:
        sync = OneReplica(cut, topology, groups, offload_optimizer=config.offload_optimizer, kernels=kernels)
    sharded = None
    if topology.tp > 1:
        reads = ShardReads(cut.parameters)
        sharded = partial(_sharded, model, _border_parts(model, sums), turning, sums, reads, overlap)
    peaks = None if model.planned is None else model.planned[1].peaks
    offload = offload_options(config, model.strategy, 0 if peaks is None else peaks[topology.pp_rank].pool)
    divides = config.micro_batch_size is not None
    executor = _C.Executor(
        _chunks(model, topology, sync, sharded, PartDraws(cut.model) if divides else None),
        topology.pp_rank,
        topology.pp,
        groups.p2p_names(),
        device,
        timeout,
        topology.describe(topology.rank),
        connect_stages(topology, world, timeout) if over_tcp and topology.pp > 1 else None,
        arbiter,
        list(hosts.stages),
        offload,
        clock,
    )
    for part in (executor, sync):
        progress.life.end_with(part)
        undo.callback(part.close)
        undo.callback(progress.life.forget, part)
    progress.follow(executor)
    undo.callback(progress.follow, None)
    keep = [] if offload is None else [keeper(executor, cut.model)]
    counting = shards if device.type == "cpu" else None  # which hears of tensors in host memory only
    recorder = StepRecorder(executor, sync, arbiter, progress, clock, topology.pp_rank, counting)
    undo.callback(recorder.close)
    pipeline = Pipeline(topology, groups, executor, progress, *keep)
    step = Step(
        *(cut, topology, config.seed, device),
        pipeline=pipeline,
        sync=sync,
        recorder=recorder,
        replanner=Replanner(topology, groups, config, device, model.proposed, has_times=clock.tells_time),
        overlap=overlap,
        supervisor=supervisor,
        mean_over_replicas=lambda value: _mean(value, groups),
        memory=memory,
        changes=less.changes,
        division=_division(model, pipeline),
    )
    memory.begin([*cut.parameters.values(), *cut.model.buffers()])
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


def _called(order: Order, example: Mapping[str, Any], call: ModelCall | None) -> Mapping[str, Any]:
    """Returns the arguments with which the loss function calls the model."""
    return example if call is None else arguments_of(order.model, order.config, example, call)


def _samples(order: Order, example: Mapping[str, Any], call: ModelCall | None) -> planner.Samples:
    """Returns what the planner is told of a micro-batch's samples."""
    number = samples_of(example)
    why = "" if number is not None else why_not_divided(example)
    if order.config.micro_batch_size != AUTO or not order.plans or number is None:
        if why and order.config.micro_batch_size == AUTO and order.topology.rank == 0:
            announce(logger, f'micro_batch_size="auto": micro-batches stay whole, since {why}')
        return planner.Samples(None if why else number or 1, None)
    return planner.Samples(number, _called(order, part_of(example, 0, 1, number), call))


def _divided(
    config: ParallelConfig, example: Mapping[str, Any], world: WorldGroup
) -> tuple[ParallelConfig, Mapping[str, Any]]:
    """Returns the layout with as many micro-batches as parts run, and the example's first part; all ranks call."""
    size = config.part_size
    assert size is not None
    parts, error = 1, None
    try:
        parts = number_of_parts(example, size)
    except ConfigError as own:
        error = own
    agree(world, "", 0, error)
    samples = samples_of(example)
    if parts > 1 and samples is not None:
        example = part_of(example, *even_part(samples, parts, 0), samples)
    parts = world.share(parts, timeout=world.patience)  # replicas may have micro-batches of different sizes
    return replace(config, micro_batches=parts * config.micro_batches), example


def _division(model: CutModel, pipeline: Pipeline) -> Division | None:
    size, parameters = model.config.part_size, [*model.cut.model.parameters()]
    if size is None:
        return None

    def in_16_bits() -> bool:
        with model.autocast():
            on = any(torch.is_autocast_enabled(kind) for kind in {one.device.type for one in parameters} - {"meta"})
        return on or any(one.dtype.itemsize == 2 for one in parameters if one.is_floating_point())

    schedule = Programs.of(model.strategy).evaluation(COMPARED)
    return Division(size, pipeline, schedule, model.cut.model, in_16_bits=in_16_bits)


def _bucket_schedule(model: CutModel, stage: int) -> BucketSchedule:
    cut = model.cut
    least = model.strategy.bucket_bytes
    buckets = bucket_layout(cut.trainable(), cut.placement, cut.trace, cut.ranges, stage, least, cut.parts.rank)
    return BucketSchedule.make(buckets, model.strategy, stage)


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
    if len(numbers) > 1 or any(without_graph[number] for number in numbers):
        once = OncePerMicroBatch(cut.model, cut.trace.modules if cut.trace else ())
    last = model.strategy.num_chunks - 1
    return [
        PipelineChunk(v, v == last, cut.model, cut.split, sync, once, None if sharded is None else sharded(v), draws)
        for v in numbers
    ]


def _sharded(
    model: CutModel,
    parts: BorderParts | None,
    turning: TurningOps,
    sums: KeptSums,
    reads: ShardReads,
    overlap: OverlapTrial,
    chunk: int,
) -> ShardedChunk:
    cut = model.cut
    sub = SubPipeline(chunk, cut.model, cut.split, turning, shares_sequence=bool(cut.parts.plan.sequence))
    return ShardedChunk(chunk, parts, sub, sums, reads, lambda: overlap.in_halves)


def _border_parts(model: CutModel, sums: KeptSums) -> BorderParts | None:
    cut = model.cut
    if model.strategy.num_chunks == 1 or cut.trace is None:
        return None
    widths = {size for parameter in cut.model.parameters() for size in whole_shape(parameter)}
    return BorderParts(cut.trace, cut.ranges, widths, sums, cut.parts.plan.sequence)


def _slowest(world: WorldGroup, times: Tensor) -> None:
    world.all_reduce(times, torch.maximum)


def _share_weights(cut: RankModel, groups: Groups) -> None:
    """Replica 0's weights, and of several copies in a replica the first one's, become everybody's."""
    shared = cut.placement.shared(cut.parts.rank)
    for name in sorted(set(shared) & set(cut.parameters)):
        places = shared[name]
        dist.broadcast(cut.parameters[name].data, groups.topology.source_of(places), group=groups.ties[places])
    buffers = [b for b in cut.model.buffers() if b.device.type != "meta"]
    for tensor in [*(p.data for p in cut.parameters.values()), *buffers]:
        groups.data.broadcast(tensor, timeout=groups.world.patience)


def _mean(value: Tensor, groups: Groups) -> Tensor:
    mean = value.detach().clone()
    groups.data.all_reduce(mean)
    return mean / groups.topology.dp
