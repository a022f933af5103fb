"""Planning on all ranks: how weights are shared out, then, with times of the model's layers and the network, how the
model is spread; rank 0 chooses."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fold3d.comms.connections import uses_tcp
from fold3d.comms.consistency import agree, make_alike
from fold3d.comms.groups import Groups
from fold3d.comms.interface import host_identity
from fold3d.comms.world_group import WorldGroup
from fold3d.config import AUTO, ParallelConfig, text_of_bytes
from fold3d.data_parallel.optimizer.separable import check_separable
from fold3d.device import processes_of_host
from fold3d.engine.planning.memory_limit import memory_limit
from fold3d.errors import ConfigError, MemoryLimitError, RankError
from fold3d.observe.announce import announce
from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS, NetworkCosts, Profile
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import Spared
from fold3d.plan.memory_options import predicted_curves
from fold3d.plan.micro_batch_size import in_parts, remark_on, search_sizes, sizes_of
from fold3d.plan.proposal import Proposal
from fold3d.plan.resolve import programs_of
from fold3d.plan.search import decide
from fold3d.plan.strategy import Constraints
from fold3d.profile.layers import profile_model
from fold3d.profile.network import ShardLink, copy_bandwidth, probe_network, probe_shards
from fold3d.profile.shard import halves_factor, shard_profile
from fold3d.recompute import Recompute
from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting.plan_sharding import plan_sharding
from fold3d.stage.offload import room_for_pools
from fold3d.tensor_parallel.vocabulary.chunked_loss import install_chunked_loss
from fold3d.topology import Topology
from fold3d.trace import Trace
from fold3d.trace.batches import synthetic_example
from fold3d.trace.coat import Coat
from fold3d.trace.wrappers import users_hooks
from fold3d.weights.part_marks import is_part

logger = logging.getLogger(__name__)

_cut_by: WeakKeyDictionary[Module, dict[object, ShardingPlan]] = WeakKeyDictionary()
"""By tp and tp_plan: how a model was spread, whose next engine finds parts of weights only."""
_SECONDS_OF_ONE = 1.0
"""For which a micro-batch of one sample is measured, where it is."""


Autocast = Callable[[], AbstractContextManager[Any]]
MakeOptimizer = Callable[[list[Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model, and how it will be trained; the same on every rank."""

    model: Module
    config: ParallelConfig
    device: torch.device
    optimizer: MakeOptimizer | None = None
    """Makes one like the training's, for the planner to try."""
    autocast: Autocast = nullcontext
    """What the training puts around layers."""
    compile_options: Mapping[str, Any] | None = None
    """Of torch.compile, for each block; None: blocks are not compiled."""

    @property
    def limit(self) -> int | None:
        """Bytes of memory that a rank may use."""
        return memory_limit(self.config, self.device)


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of the samples of a rank's micro-batch."""

    number: int | None
    """None: nobody knows how to divide it."""
    one: Mapping[str, Any] | None
    """Keyword arguments of the model's forward for one of them; None: the planner shall not divide them."""


UNKNOWN = Samples(None, None)


def shard_alike(
    training: Training, recording: Trace, world: WorldGroup, example: Mapping[str, Any] | None
) -> ShardingPlan:
    """Returns rank 0's plan of how the model is spread over tensor-parallel groups; all ranks of the job call.

    The ranks of a group are about to keep a part of each weight: where their models have different values, those of the
    group's first rank become everybody's.

    Args:
        example: what the model was recorded with; None: what it makes up by itself.
    Raises: on every rank what planning raises on rank 0; ConfigError when the ranks of a group have different models.
    """
    model, config = training.model, training.config
    asked = config.tp, tuple(sorted((config.tp_plan or {}).items())), config.sequence_parallel
    known = _cut_by.get(model, {}).get(asked) if any(map(is_part, model.parameters())) else None

    def plan(watchers: list[str]) -> ShardingPlan:
        if known is not None:  # another engine has left parts of these weights
            return known
        made = synthetic_example(model) if example is None else example
        watched = next(filter(None, watchers), "") if config.sequence_parallel == AUTO else ""
        shares = bool(config.sequence_parallel) and not watched
        found = plan_sharding(model, recording, made, config.tp, config.tp_plan, sequence_parallel=shares)
        if config.sequence_parallel is True and not found.sequence:
            raise ConfigError(
                f"sequence_parallel=True: {found.sequence_reason}. Set it to False, where every rank has the whole "
                'sequence, or to "auto"'
            )
        if watched or found.sequence_reason:
            reason = watched or found.sequence_reason
            announce(logger, f"sequence_parallel: every rank has the whole sequence, since {reason}")
        for note in found.notes:
            logger.warning("%s", note)
        return found

    sharding = world.decide(_watcher(model, recording), plan, timeout=world.patience)
    _cut_by.setdefault(model, {})[asked] = sharding
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    real = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta and not is_part(tensor)}
    make_alike(real, world.tensor, timeout=world.patience)
    return sharding


def _watcher(model: Module, recording: Trace) -> str:
    """Returns what would see a part of the sequence in a block where it expects all of it, in words."""
    blocks = tuple(f"{block}." for block in recording.blocks)
    for name, module in model.named_modules():
        if f"{name}.".startswith(blocks) and any(users_hooks(module)):
            return f"a hook of yours looks at {name}"
    kept = next((name for name in recording.kept if name.startswith(blocks)), None)
    return "" if kept is None else f"{kept} keeps a tensor of the forward"


def plan_auto(
    training: Training,
    constraints: Constraints,
    recording: Trace | None,
    layout: Trace | None,
    world: WorldGroup,
    example: Mapping[str, Any] | None,
    sharding: ShardingPlan | None,
    samples: Samples = UNKNOWN,
) -> tuple[TrainingJob, Proposal] | None:
    """Decides what is "auto"; all ranks of the job call that have recorded the model.

    Args:
        recording: of this rank's micro-batch; None: it cannot be recorded.
        layout: what all ranks cut by.
        sharding: how weights are spread over tensor-parallel groups; None where there are none.
        samples: of `example`.
    Returns: what the planner was told, of whole micro-batches, and what it proposes; None where there is nothing to
        fold.
    Raises: ConfigError; RankError when another rank failed.
    """
    config = training.config
    error: Exception | None = None
    profile = one = None
    try:
        if recording is not None and example is not None:
            profile = profile_of(training, recording, example, sharding)
            if samples.one is not None and training.limit is not None:
                one = _of_one(training, recording, samples.one, sharding)
    except Exception as own:
        if config.pp * config.tp > 1 or config.memory_limit is not None:
            error = own
        else:  # what need not be cut trains all the same
            logger.warning("the model stays in one piece, it cannot be measured (%s: %s)", type(own).__name__, own)
    agree(world, 0, error)  # nobody may wait for the measurements of a rank that failed
    mine = profile
    profile = agreed_profile(world, recording, profile)
    if layout is None or profile is None:
        if config.memory_limit is not None:
            raise ConfigError(
                f"memory_limit={config.memory_limit} cannot be kept: the model has no blocks that could be measured; "
                'remove it and, for less memory, set dp_sync="zero1"'
            )
        return None
    one = agreed_profile(world, recording, one, every=True)
    stage_times = _stage_times(world, mine)
    return _propose(training, constraints, layout, profile, world, samples.number, one, stage_times)


def _of_one(
    training: Training, recording: Trace, example: Mapping[str, Any], sharding: ShardingPlan | None
) -> Profile | None:
    """Returns `profile_of` a micro-batch of one sample; None where that cannot be measured."""
    try:
        return profile_of(training, recording, example, sharding, _SECONDS_OF_ONE)
    except Exception as error:  # some models want several samples
        logger.warning(
            'micro_batch_size="auto": micro-batches stay whole, since one sample cannot be measured (%s: %s)',
            type(error).__name__,
            error,
        )
        return None


def profile_of(
    training: Training,
    recording: Trace,
    example: Mapping[str, Any],
    sharding: ShardingPlan | None = None,
    seconds: float = 2.0,
) -> Profile:
    """Returns what layers cost on a rank, measured on this one; with which exchanges, where they have shards.

    Args:
        seconds: about how long to measure.
    Raises: whatever the model raises.
    """
    model, config, device, autocast = training.model, training.config, training.device, training.autocast
    tokens = config.chunked_loss

    def prepare(copied: Module) -> None:
        if tokens is not None:
            install_chunked_loss(Coat(), copied, tokens, tells=False)

    profile = profile_model(
        *(model, recording, example, device),
        recompute=Recompute() if config.recompute == AUTO else Recompute.parse(config.recompute),
        optimizer=training.optimizer,
        autocast=autocast,
        prepare=prepare,
        seconds=seconds,
    )
    if sharding is not None:
        profile = shard_profile(profile, model, recording, example, sharding, device, autocast, prepare)
        if config.tp_overlap != "none":
            factor = halves_factor(model, recording, example, device, autocast, seconds / 4, profile.sub_micro_batches)
            profile = replace(profile, halves_factor=factor)
    gc.collect()  # layers that were measured, and their optimizer's state: training needs the memory
    return profile


def agreed_profile(
    world: WorldGroup, recording: Trace | None, profile: Profile | None, *, every: bool = False
) -> Profile | None:
    """Returns `Profile.agreed`, the same on every rank; all ranks of the job call.

    Args:
        recording: of the micro-batch that was measured on this rank.
        profile: what was measured with it; None: nothing could be.
        every: whether all ranks must have measured.
    Returns: None where rank 0, whose layers they are, has nothing, or another rank of `every`.
    """

    def merged(shares: list[tuple[Sequence[Hashable], Profile] | None]) -> Profile | None:
        known = [share for share in shares if share is not None]
        if shares[0] is None or (every and len(known) < len(shares)):
            return None
        return Profile.agreed([profile for _, profile in known], [layers for layers, _ in known])

    mine = None
    if recording is not None and profile is not None:
        mine = [("prologue", 0), *zip(recording.blocks, recording.calls, strict=True), ("epilogue", 0)], profile
    return world.decide(mine, merged, timeout=world.patience)


UNEVEN = 1.2
"""By which factor the ranks of one host must take longer than those of another to get fewer layers."""


def slow_stages(topology: Topology, shares: Sequence[tuple[str, float | None]]) -> tuple[float, ...]:
    """Returns how long the ranks of each stage take relative to the median of all, by the slowest host that a stage has
    ranks on; nothing where hosts are about alike.

    Ranks of one host count together: they share its cores, and differ by what else it does.

    Args:
        shares: by rank: its host, and the seconds that it has measured; None: it has measured nothing.
    """
    measured = [(host, seconds) for host, seconds in shares if seconds]
    by_host = {name: median(seconds for host, seconds in measured if host == name) for name, _ in measured}
    if not by_host or max(by_host.values()) < UNEVEN * min(by_host.values()):
        return ()
    usual = median(seconds for _, seconds in measured)
    hosts: list[list[float]] = [[] for _ in range(topology.pp)]
    for rank, (host, _) in enumerate(shares):
        hosts[topology.coordinates(rank).pp].append(by_host.get(host, usual) / usual)
    return tuple(map(max, hosts))


def _stage_times(world: WorldGroup, mine: Profile | None) -> tuple[float, ...]:
    """Returns `slow_stages` of what the ranks have measured, and says so; all ranks of the job call."""
    topology, seconds = world.topology, None
    if topology.pp == 1:
        return ()
    if mine is not None and mine.measured:
        seconds = sum(mine.forward) + sum(mine.backward)
    share = host_identity(), seconds
    found = world.decide(share, lambda shares: slow_stages(topology, shares), timeout=world.patience)
    if found and topology.rank == 0:
        told = ", ".join(f"stage {stage} {times:.2f}" for stage, times in enumerate(found))
        announce(logger, f"hosts differ in speed, so stages get different numbers of layers; times of a layer: {told}")
    return found


def _propose(
    training: Training,
    constraints: Constraints,
    layout: Trace,
    profile: Profile,
    world: WorldGroup,
    samples: int | None,
    one_sample: Profile | None,
    stage_times: tuple[float, ...],
) -> tuple[TrainingJob, Proposal]:
    """Returns the fastest strategy for everything that is "auto", the same on every rank; all ranks of the job call.

    Args:
        layout, profile, one_sample: the same on every rank.
        samples: of this rank's micro-batch; None: nobody knows.
        one_sample: what a micro-batch of one sample costs; None: micro-batches are not to be divided.
        stage_times: of Job.
    Raises: ConfigError on every rank when the model cannot be spread as asked.
    """
    config, device = training.config, training.device
    topology = world.topology
    samples = world.share(samples, timeout=world.patience)
    world.progress.turn_to("measuring links")
    network = _network(profile, world, training)
    # Devices may differ.
    limit = world.decide(training.limit, lambda limits: min(filter(None, limits), default=None), timeout=world.patience)
    copied = config.offload_optimizer or (limit is not None and config.offload != "none")
    copies = _copies(config, world, device) if copied else {}
    job = TrainingJob(
        trace=layout,
        profile=profile,
        network=network,
        dp=topology.dp,
        pp=topology.pp,
        tp=topology.tp,
        style=topology.style,
        stage_times=stage_times,
        micro_batches=config.micro_batches,
        samples=samples,
        one_sample=one_sample,
        memory_limit=limit,
        pool_limit=_pool_limit(config, world) if copied else config.pool_size,
        preempt=config.preempt,
        # A compiled block is one operator, whose backward does not run in halves.
        may_split=topology.tp == 1 and training.compile_options is None,
        flush=config.flush,
        delay_correction=config.delay_correction,
        action_seconds=ACTION_SECONDS,
        bucket_seconds=BUCKET_SECONDS,
        **copies,
    )
    found: Proposal | ConfigError | None = None
    world.progress.turn_to("planning")
    if topology.rank == 0:
        try:
            chosen, proposal = _decide(job, config, constraints, lambda: steps_parts(training.optimizer))
            _check_memory(chosen, proposal, config)
            announce(logger, proposal.table if logger.isEnabledFor(logging.INFO) else proposal.brief)
            found = proposal
        except ConfigError as error:
            found = error
        except Exception as error:  # the other ranks wait for an answer
            found = ConfigError(f"planning failed ({type(error).__name__}: {error}); set segments and schedule")
    found = world.share(found, timeout=world.patience)
    if isinstance(found, ConfigError):
        raise found
    assert isinstance(found, Proposal)
    return job, found


def _decide(
    job: TrainingJob, config: ParallelConfig, constraints: Constraints, steps_parts: Callable[[], bool]
) -> tuple[TrainingJob, Proposal]:
    """Returns the best proposal, and the job that it is for: with parts of micro-batches where they may be divided."""
    if job.samples is None or job.one_sample is None:
        return job, decide(job, constraints, steps_parts)

    def plan(size: int) -> tuple[TrainingJob, Proposal]:
        made = in_parts(job, size)
        if constraints.schedule is not None and constraints.segments is not None:  # a file is for so many micro-batches
            sized = replace(config, micro_batches=made.micro_batches)
            programs_of(sized, constraints, job.dp).compute(made.micro_batches)
        return made, decide(made, constraints, steps_parts)

    found = search_sizes(sizes_of(job.samples), plan)
    remark = remark_on(found, job.samples, measured=job.profile.measured and job.one_sample.measured)
    best = found[0]
    size = None if best.size == job.samples else best.size
    return best.job, replace(best.proposal, remarks=(*best.proposal.remarks, remark), micro_batch_size=size)


def _copies(config: ParallelConfig, world: WorldGroup, device: torch.device) -> dict[str, Any]:
    """Returns what Job says of copies, the same on every rank; all ranks of the job call."""
    measured: float | str
    try:
        measured = copy_bandwidth(device, config.offload_disk)
    except OSError as error:
        measured = f"offload_disk={config.offload_disk!r}: {error}; free space there, or name another folder"
    elsewhere = device.type != "cpu" or config.offload_disk is not None
    return {
        "copy_bandwidth": world.decide(measured, _median, timeout=world.patience),
        "pool_is_elsewhere": elsewhere,
        "host_is_elsewhere": device.type != "cpu",
    }


def _median(measured: list[float | str]) -> float:
    """Raises: ConfigError with what a rank says that could not measure."""
    for one in measured:
        if isinstance(one, str):
            raise ConfigError(one)
    return median(one for one in measured if isinstance(one, float))


def _pool_limit(config: ParallelConfig, world: WorldGroup) -> int:
    """Returns the bytes that the pool of a process can have, the same on every rank; all ranks of the job call."""
    mine = room_for_pools(config) // processes_of_host() if config.pool_size is None else config.pool_size
    least: int = world.decide(mine, min, timeout=world.patience)
    return least


def steps_parts(make: MakeOptimizer | None) -> bool:
    """Returns whether the optimizer works element by element, as far as a made-up parameter tells: of one that cannot
    be made of it, `DpSync.attach` finds out."""
    try:
        optimizer = (make or torch.optim.AdamW)([Parameter(torch.zeros(2, 2))])
    except Exception:  # whatever a factory raises that looks for its own parameters
        return True
    try:
        check_separable(optimizer, parts=True)
    except Exception:
        return False
    return True


def _check_memory(job: TrainingJob, proposal: Proposal, config: ParallelConfig) -> None:
    """Raises MemoryLimitError when the best that was found needs more memory than the user allows."""
    if config.memory_size is None or proposal.memory_bytes <= config.memory_size:
        return
    strategy, spared = proposal.strategy, str(Spared.of(proposal.strategy.settings))
    host = "set offload_optimizer=True, " if job.host_is_elsewhere and not config.offload_optimizer else ""
    size = proposal.micro_batch_size
    divided = "" if size is None else f", micro_batch_size={size}"
    smaller = "use smaller micro-batches, "
    if job.samples is not None and not strategy.schedule.endswith(".csv"):
        tried = 1 if job.one_sample is None else job.samples  # all sizes, where it was "auto"
        least = max(curve.peak.device for curve in predicted_curves(in_parts(job, tried), strategy))
        needs = f"(a sample at a time needs about {text_of_bytes(least)})"
        smaller = f'set micro_batch_size="auto" {needs}, ' if least < proposal.memory_bytes else ""
    raise MemoryLimitError(
        f"memory_limit={config.memory_limit}: stage {proposal.fullest_stage} would need about "
        f"{text_of_bytes(proposal.memory_bytes)}, the least that was found ({strategy.segments} segments, "
        f"{strategy.schedule}, dp_sync {strategy.dp_sync}{spared and f', {spared}'}{divided}); raise memory_limit or "
        f"pp, {smaller}{host}or leave more of segments, schedule, dp_sync, recompute and offload at "
        "auto"
    )


@contextmanager
def probing(topology: Topology, world: WorldGroup, training: Training, *, with_p2p: bool = True) -> Iterator[Groups]:
    """Makes the groups of a mesh, to measure its links; all ranks of the job run the body.

    Args:
        with_p2p: also by which torch passes messages and sums on, if it does.
    Raises: RankError when a rank is gone or does not come.
    """
    config, device = training.config, training.device
    with_p2p = with_p2p and not uses_tcp(config.transport, device)
    groups = Groups(topology, device, config.timeout_seconds, (), with_p2p=with_p2p, world=world)
    try:
        yield groups
    except RuntimeError as error:
        raise RankError(f"{topology.describe(topology.rank)} could not measure the network: {error}") from error
    finally:
        groups.close()


def links_of(groups: Groups, training: Training, activation_bytes: int) -> NetworkCosts:
    """Returns what `probe_network` measures of the groups; all ranks of the job call."""
    config, device = training.config, training.device
    over_tcp = uses_tcp(config.transport, device)
    return probe_network(groups, config.timeout_seconds, over_tcp=over_tcp, activation_bytes=activation_bytes)


def shard_link(groups: Groups, training: Training, size: int) -> ShardLink:
    """Returns what `probe_shards` measures of the groups, with sums of `size` bytes; all ranks of the job call."""
    config, device = training.config, training.device
    over_tcp = uses_tcp(config.transport, device)
    return probe_shards(groups, config.timeout_seconds, over_tcp=over_tcp, size=size)


def _network(profile: Profile, world: WorldGroup, training: Training) -> NetworkCosts:
    with probing(world.topology, world, training) as groups:
        found = links_of(groups, training, max(profile.activation_bytes))
        return found if world.topology.tp == 1 else shard_link(groups, training, _largest_sum(profile)).of(found)


def tp_link(profile: Profile, world: WorldGroup, training: Training) -> ShardLink:
    """Returns what links the ranks of tensor-parallel groups; all ranks of the job call.

    Raises: RankError when it cannot be measured.
    """
    with probing(world.topology, world, training, with_p2p=False) as groups:
        return shard_link(groups, training, _largest_sum(profile))


def _largest_sum(profile: Profile) -> int:
    return max((one.bytes for of in (*profile.tp_forward, *profile.tp_backward) for one in of), default=1)
