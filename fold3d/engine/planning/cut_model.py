"""What a rank trains, cut: the model is recorded, planned and cut in place, alike on all ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from fold3d.comms.consistency import agree, all_or_none, compare
from fold3d.comms.world_group import WorldGroup
from fold3d.config import AUTO, GRAPH, ParallelConfig
from fold3d.data_parallel.optimizer.separable import check_built
from fold3d.engine.division import number_of_parts, why_not_divided
from fold3d.engine.planning import planner
from fold3d.engine.planning.agreed_recording import (
    agreed_graph,
    agreed_layout,
    buckets_of,
    layout_of,
    parameters_of,
    settings_of,
)
from fold3d.engine.planning.tp_forecast import TpForecast, forecast_of, predict_tp_sync, warn_of_spread
from fold3d.errors import ConfigError, SplitError
from fold3d.observe.announce import announce
from fold3d.placement.bucket_layout import BucketSpec, bucket_layout
from fold3d.placement.partition import split_ranges
from fold3d.plan.job import TrainingJob
from fold3d.plan.micro_batch_size import in_parts
from fold3d.plan.programs import Programs
from fold3d.plan.proposal import Proposal
from fold3d.plan.resolve import check_buckets, fitted, needs_planner, unplanned
from fold3d.plan.space.offload import offloaded_chunks
from fold3d.plan.strategy import Constraints, Strategy
from fold3d.recompute import Recompute
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import even_part
from fold3d.stage.loss_run import NOT_CALLED, LossRun
from fold3d.stage.micro_batch import DropoutKey, LossFunction
from fold3d.stage.offload import check_folder, check_pool, prove_room, refuse_without_effect
from fold3d.stage.rank_model import RankModel, begin_loss, record
from fold3d.stage.recompute import check_patterns
from fold3d.tensor_parallel.weight_reads import Reads
from fold3d.topology import Topology
from fold3d.trace import Trace
from fold3d.trace.arguments import by_name, with_values
from fold3d.trace.batches import part_of, samples_of
from fold3d.trace.compound import is_compound
from fold3d.trace.shadow import shared_shadows
from fold3d.trace.wrappers import whole_shape
from fold3d.weights.pretrained import check_folder as check_weights
from fold3d.weights.release import is_released

logger = logging.getLogger(__name__)

_numbers = itertools.count()  # of the engines of one process


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest(planner.Training):
    """What the user wants built."""

    constraints: Constraints
    """From `resolve_auto`."""
    topology: Topology
    weights: str | None
    """Folder with safetensors."""
    max_grad_norm: float | None = None
    """To which gradients are clipped, where the engine does."""
    trained_later: Callable[[], Collection[str]] = tuple
    """Returns names of parameters that may be trained although they are frozen when the model is cut."""

    @property
    def plans(self) -> bool:
        """Whether the planner decides anything."""
        return needs_planner(self.config, self.constraints, self.topology.dp, limited=self.limit is not None)

    @property
    def may_cut(self) -> bool:
        """Whether the model may be cut into several chunks."""
        return self.config.pp > 1 or self.constraints.segments != 1

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
    buckets: tuple[BucketSpec, ...]
    """Of this rank's gradients."""
    proposed: tuple[TrainingJob, Proposal] | None
    """What the planner was told, of whole micro-batches, and said, if another schedule may be chosen."""
    resizes: bool
    """Whether another number of samples may pass the model at once while training goes on."""
    planned: tuple[TrainingJob, Proposal] | None
    """What the planner was told and said; None where it was not asked."""
    overlap_limit: float | None
    """Seconds of a step's forwards and backwards from which the predicted way of hiding TP.sync is doubted; None: it
    was not predicted."""
    name: str
    """This engine's in the job."""
    autocast: planner.Autocast
    """What the training puts around layers."""
    begun: LossRun | None = None
    """Of the first micro-batch, or of its first part: its loss function, which rests where it calls the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class First:
    """The first micro-batch of a training or an evaluation, with which the model is recorded."""

    inputs: dict[str, Any]
    function: LossFunction
    """What calls the model with it."""
    key: DropoutKey
    """Of its random numbers."""
    trains: bool
    """Whether a backward will follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    """What is known of the model before it is planned; the same on all ranks but for what is of this rank's batch."""

    config: ParallelConfig
    constraints: Constraints
    example: Mapping[str, Any] | None
    samples: planner.Samples = planner.UNKNOWN
    begun: LossRun | None = None
    read: frozenset[str] = frozenset()
    """Weights that the loss function has read so far."""
    recording: Trace | None = None
    layout: Trace | None = None
    whole: str = ""
    """Why the model stays in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decided:
    """What the planner, or nobody, has decided."""

    strategy: Strategy
    sharding: ShardingPlan | None
    proposed: tuple[TrainingJob, Proposal] | None
    """The job as it runs."""
    whole: TrainingJob | None
    """The same of whole micro-batches."""
    forecast: TpForecast | None


@shared_shadows()  # until RankModel changes the model, nobody does
def cut_model(
    order: BuildRequest, world: WorldGroup, example: Mapping[str, Any] | None, first: First | None
) -> CutModel:
    """Records the model, plans what is "auto", and cuts the model in place; all ranks of the job call.

    Args:
        example: what the model's forward takes, to record with; None: the first micro-batch, or what the model makes up
            by itself, if it does.
        first: with what work begins, if that is why the model is cut now. Its loss function goes on with the step.
    Raises: TraceError, ConfigError; RankError when another rank failed.
    """
    with ExitStack() as undo:
        recorded = _agreed(order, world, _record(order, world, example, first, undo))
        recorded, decided = _decide(order, world, recorded)
        made = _cut(order, world, recorded, decided, undo)
        undo.pop_all()
    return made


def _record(
    order: BuildRequest, world: WorldGroup, example: Mapping[str, Any] | None, first: First | None, undo: ExitStack
) -> _Recorded:
    """Returns what this rank has recorded of its micro-batch."""
    model, config = order.model, order.config
    inputs = example if first is None else first.inputs
    with all_or_none(world):  # a rank that cannot read its files must not let the others wait
        check_folder(config)
        if order.weights is not None:
            check_weights(model, order.weights)
    size = config.part_size
    if size is not None and inputs is not None:
        config = _divided(config, inputs, world)
        if first is None:
            example = _first_part(inputs, size)
        elif first.trains:  # an evaluation is not divided
            inputs = _first_part(inputs, size)
    world.progress.turn_to("recording the model")
    found = _Recorded(config=config, constraints=order.constraints, example=example)
    if not order.records:
        return found
    with all_or_none(world):
        if inputs is not None:
            if first is not None:
                reads = Reads(model)
                with reads if order.topology.pp * order.topology.tp > 1 else nullcontext():
                    given = (model, config, first.function, dict(inputs), order.device, first.key, first.trains)
                    begun = begin_loss(*given, may_cut=order.may_cut)
                undo.callback(begun.let_go)
                found = replace(found, begun=begun, read=frozenset(reads.parameters))
                if example is None or size is not None:
                    example = _arguments(order, begun)
                if size is not None and example is not None and not first.trains:
                    example = with_values(example, _first_part(example, size))
            if example is not None:
                found = replace(found, example=example, samples=_samples(order, inputs, example))
        recording = record(model, config, example, found.constraints.segments)
        recording = None if recording is None else recording.under(config.tp)
        if recording is not None and config.recompute != AUTO:
            check_patterns(model, recording.blocks, Recompute.parse(config.recompute))
    return replace(found, recording=recording, layout=recording)


def _agreed(order: BuildRequest, world: WorldGroup, found: _Recorded) -> _Recorded:
    """Returns the same with one choice of blocks, and one layout, on all ranks."""
    recording, topology = found.recording, order.topology
    if topology.world == 1 or not order.records:
        return found
    if found.config.partition == GRAPH and topology.dp > 1:
        assert recording is not None, "a graph is cut or refused"
        with all_or_none(world):
            recording = agreed_graph(order.model, recording, world, found.example)
    is_cut = topology.pp * (found.constraints.segments or 1) > 1
    layout, whole = agreed_layout(order.model, recording, world, is_cut=is_cut)
    constraints = found.constraints
    if whole:
        constraints = replace(constraints, segments=1)
        if topology.rank == 0:
            announce(logger, f"the model is not cut, segments=1: {whole}")
    if layout is None:
        recording = None
    elif recording is not None and not whole:
        recording = recording.placed_as(layout)
    return replace(found, recording=recording, layout=layout, whole=whole, constraints=constraints)


def _decide(order: BuildRequest, world: WorldGroup, found: _Recorded) -> tuple[_Recorded, _Decided]:
    """Plans what is "auto"; returns besides what was recorded, with the settings that are decided now."""
    recording, layout, example = found.recording, found.layout, found.example
    training = replace(order, config=found.config)
    config, constraints, begun = found.config, found.constraints, found.begun
    proposed: tuple[TrainingJob, Proposal] | None = None
    strategy: Strategy | None = None
    sharding: ShardingPlan | None = None
    if config.tp > 1:
        world.progress.turn_to("dividing the blocks")
        assert recording is not None, "what has shards was recorded"
        sharding = planner.shard_alike(training, recording, world, example)
    if order.plans:
        world.progress.turn_to("measuring layers")
        proposed = planner.plan_auto(training, constraints, recording, layout, world, example, sharding, found.samples)
        if proposed is None:  # nothing can be cut
            constraints = replace(constraints, segments=1)
        else:
            strategy = proposed[1].strategy
    whole, size = None, None
    if proposed is not None:
        whole, size = proposed[0], proposed[1].micro_batch_size
        proposed = whole if size is None else in_parts(whole, size), proposed[1]
    if config.micro_batch_size == AUTO:  # decided: from here on it is a number, or nothing
        number_of = config.micro_batches if strategy is None else strategy.micro_batches
        if begun is not None and number_of != config.micro_batches:  # with the whole of what runs in parts
            begun.let_go()
            begun = None
        reduction = None if size is None else config.loss_reduction
        config = replace(config, micro_batch_size=size, micro_batches=number_of, loss_reduction=reduction)
    forecast = None if proposed is None or sharding is None else forecast_of(*proposed)
    if config.strategy is not None:
        with all_or_none(world):
            strategy = fitted(config, layout)
    if strategy is None:
        with all_or_none(world):
            chunks = config.pp * (constraints.segments or 1)
            ranges = ((0, 0),) if layout is None else tuple(split_ranges(layout, chunks))
            strategy = unplanned(config, constraints, order.topology.dp, ranges)
        if sharding is not None:
            assert recording is not None and layout is not None, "what has shards was recorded"
            strategy, forecast = predict_tp_sync(
                replace(order, config=config), recording, layout, strategy, world, example, sharding
            )
    if sharding is not None:
        warn_of_spread(forecast, world)
    decided = _Decided(strategy=strategy, sharding=sharding, proposed=proposed, whole=whole, forecast=forecast)
    return replace(found, config=config, constraints=constraints, begun=begun), decided


def _cut(order: BuildRequest, world: WorldGroup, found: _Recorded, decided: _Decided, undo: ExitStack) -> CutModel:
    """Cuts the model in place, alike on all ranks."""
    world.progress.turn_to("cutting the model")
    model, config, strategy, sharding = order.model, found.config, decided.strategy, decided.sharding
    proposed, layout = decided.proposed, found.layout
    mine = None if found.whole else found.recording
    of_all = parameters_of(model) | {"max_grad_norm": repr(order.max_grad_norm)}
    with all_or_none(world):
        refuse_without_effect(config, decided=proposed is not None and proposed[0].pool_is_elsewhere)
        check_pool(config, strategy, 0 if proposed is None else max(peak.pool for peak in proposed[1].peaks))
        prove_room(config, strategy, model, mine, found.example, order.device, order.autocast, sharding)
        check_built(config.kernels, order.device)
        cut = RankModel(
            *(model, config, strategy, order.topology, order.device, mine or layout, order.weights, sharding),
            compile_options=order.compile_options,
            layout=layout,
        )
        undo.callback(cut.coat.close)
        _refuse_cut_weights(model, found.read)
        actions = Programs.of(strategy).compute(config.micro_batches).csv()
        of_all = settings_of(config, strategy) | {"schedule's actions": actions} | of_all
        of_all |= layout_of(layout, cut.placement, sharding)
        least, tp_rank = strategy.bucket_bytes, cut.parts.rank
        later = order.trained_later()
        may_be = {n for n, p in cut.parameters.items() if n in later and p.is_floating_point() and not is_compound(p)}
        trained = {name: p for name, p in cut.parameters.items() if p.requires_grad or name in may_be}
        buckets = bucket_layout(trained, cut.placement, layout, cut.ranges, cut.stage, least, tp_rank)
        if config.strategy is not None and strategy.dp > 1:
            check_buckets(strategy, cut.stage, 1 + max((bucket.planned for bucket in buckets), default=-1))
    number = agree(world, next(_numbers), None)
    # What the user has fixed stays fixed, so a schedule of theirs is never exchanged.
    may_change = found.constraints.schedule is None and found.constraints.group_size is None
    return CutModel(
        cut=cut,
        config=config,
        strategy=strategy,
        buckets=tuple(buckets),
        proposed=(decided.whole, proposed[1]) if may_change and proposed and decided.whole else None,
        resizes=may_change and _resizes(order, decided.whole, strategy),
        planned=proposed,
        overlap_limit=None if decided.forecast is None else decided.forecast.other,
        name=f"{compare(world, of_all, buckets_of(buckets, cut.parameters))}/{number}",
        autocast=order.autocast,
        begun=found.begun,
    )


def _resizes(order: BuildRequest, whole: TrainingJob | None, strategy: Strategy) -> bool:
    """Returns whether micro-batches may be divided otherwise while training goes on: where that was left open and
    measured, and nothing was made for their sizes, as compiled blocks and the pool of what leaves the device are."""
    if not order.config.retune or whole is None or whole.one_sample is None or strategy.tp > 1:
        return False
    return order.compile_options is None and not offloaded_chunks(strategy)


def _refuse_cut_weights(model: Module, read: frozenset[str]) -> None:
    """Raises: ConfigError where a loss function that has begun, with the whole model, has read of what is no longer
    whole."""
    for name in sorted(read):  # the same one on every rank
        weight = model.get_parameter(name)
        if is_released(weight) or whole_shape(weight) != weight.shape:
            raise ConfigError(
                f"the loss function uses a part of the model by itself: it read the weight {name!r} before it called "
                "the model with the first micro-batch. By that micro-batch the model is divided, so this rank does not "
                "have the whole weight any more: set pp=1 and segments=1, and tp=1 or tp_plan={NAME: 'replicate'}; or "
                "put such a term into the optimizer (weight_decay is an L2 penalty)"
            )


def _arguments(order: BuildRequest, begun: LossRun) -> Mapping[str, Any] | None:
    """Returns with what the loss function calls the model; None where it did not."""
    if begun.call is None:
        if max(order.config.pp, order.config.tp, order.constraints.segments or 1) > 1:
            raise SplitError(NOT_CALLED)
        return None
    with torch._C.DisableTorchFunctionSubclass():  # a number that knows whether it is used is not
        values: dict[str, Any] = tree_map_only(Tensor, torch.detach, begun.call.kwargs)
    return by_name(order.model, begun.call.module, begun.call.args, values).reading(begun.only_loss)


def _samples(order: BuildRequest, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> planner.Samples:
    """Returns what the planner is told of a micro-batch's samples."""
    number = samples_of(inputs)
    why = "" if number is not None else why_not_divided(inputs)
    if order.config.micro_batch_size != AUTO or not order.plans or number is None:
        if why and order.config.micro_batch_size == AUTO and order.topology.rank == 0:
            announce(logger, f'micro_batch_size="auto": micro-batches stay whole, since {why}')
        return planner.Samples(None if why else number or 1, None)
    return planner.Samples(number, with_values(arguments, part_of(arguments, 0, 1, number)))


def _divided(config: ParallelConfig, inputs: Mapping[str, Any], world: WorldGroup) -> ParallelConfig:
    """Returns the layout with as many micro-batches as parts run; all ranks call."""
    assert config.part_size is not None
    with all_or_none(world):
        parts = number_of_parts(inputs, config.part_size)
    parts = world.share(parts, timeout=world.patience)  # replicas may have micro-batches of different sizes
    return replace(config, micro_batches=parts * config.micro_batches)


def _first_part(inputs: Mapping[str, Any], size: int) -> Mapping[str, Any]:
    """Returns the first of the parts of at most `size` samples."""
    parts, samples = number_of_parts(inputs, size), samples_of(inputs)
    return inputs if parts == 1 or samples is None else part_of(inputs, *even_part(samples, parts, 0), samples)
