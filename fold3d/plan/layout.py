"""A job as the numbers of csrc/core/plan: cuts of its model, what their chunks cost, what a step of a plan takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.offload import Offload
from fold3d.placement.layers import layer_reads
from fold3d.plan.costs import as_tuple, pause_bytes
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import NOTHING, Spared
from fold3d.plan.strategy import Modes, Orders, Ranges, Strategy
from fold3d.recompute import Choice, Recompute
from fold3d.schedule.library import config_errors
from fold3d.trace import Trace

Layout = _C.PlanLayout


def places(trace: Trace) -> list[int]:
    """Returns the blocks at which a chunk may start."""
    return [block for block, reason in enumerate(trace.borders) if not reason or block == 0]


_OF_JOB = (
    *("dp", "pp", "micro_batches", "style", "stage_times", "hosts", "preempt", "action_seconds", "bucket_seconds"),
    *("copy_bandwidth", "gradient_share", "gradient_delay", "flush", "offload_optimizer", "memory_limit", "pool_limit"),
    *("pool_is_elsewhere", "may_split"),
)
_OF_PROFILE = (
    *("forward", "backward", "exposed_forward", "exposed_backward", "activation_bytes", "update_seconds"),
    *("optimizer_bytes", "update_bytes", "updates_together"),
)
_OF_NETWORK = ("bandwidth", "pp_bandwidth", "pp_latency", "hop_latency")
"""What csrc/core/plan calls by the same name."""


def numbers_of(job: TrainingJob) -> _C.PlanJob:
    """Returns the job as numbers: parameters by their places in the profile, layers from prologue to epilogue."""
    trace, profile, network = job.trace, job.profile, job.network
    model = _C.PlanJob()
    for source, names in ((job, _OF_JOB), (profile, _OF_PROFILE), (network, _OF_NETWORK)):
        for name in names:
            value = getattr(source, name)
            setattr(model, name, list(value) if isinstance(value, tuple) else value)
    model.toll = network.toll * profile.busy
    model.starts = places(trace)
    model.closed_because = next((reason for reason in trace.borders if reason), "")
    model.reads = layer_reads(trace, {name: place for place, name in enumerate(profile.gradient_bytes)})
    model.gradient_bytes = list(profile.gradient_bytes.values())
    model.parameter_bytes = [profile.parameter_bytes[name] for name in profile.gradient_bytes]
    model.sums = [sum(exchange.bytes for exchange in layer) for layer in profile.tp_forward]
    model.set_layers([as_tuple(layer) for layer in profile.layers])
    for one in profile.inside:
        model.add_inside([as_tuple(layer) for layer in one.layers], list(one.seconds))
    if job.links is not None:
        model.forward_links, model.backward_links = (list(rates) for rates in job.links)
    model.slice_bytes = pause_bytes(network.bandwidth) if job.slice_bytes is None else job.slice_bytes
    model.weight_versions = 1 if job.flush and job.delay_correction != "predict" else 2
    if job.delay_correction == "error_feedback":  # the update before, of the parameters' own type
        gradients = sum(profile.gradient_bytes.values())
        model.optimizer_bytes += sum(model.parameter_bytes) / gradients if gradients else 0.0
    return model


def core_spared(job: TrainingJob, spared: Spared) -> _C.PlanSpared:
    """Returns what is spared as csrc/core/plan says it."""
    known = [inside.patterns for inside in job.profile.inside]

    def inside(choice: Choice) -> int:
        if not choice.patterns:
            return -1
        return known.index(choice.patterns) if choice.patterns in known else len(known)  # nothing is known of it

    again = [(choice.full, choice.every, inside(choice)) for choice in spared.recompute.choices]
    return _C.PlanSpared(again, spared.offload.what, spared.offload.percent)


def spared_of_core(job: TrainingJob, found: _C.PlanSpared, fixed: Spared) -> Spared:
    """Returns what a search has found; of modules inside of blocks it takes only what is `fixed`."""
    again = fixed.recompute
    if found.again != core_spared(job, fixed).again:
        again = Recompute(tuple(Choice(full=full, every=every) for full, every, _ in found.again))
    return Spared(again, Offload(found.leaves, found.percent))


def cut(job: TrainingJob, segments: int, *, first: float = 1.0, last: float = 1.0, grow: bool = False) -> Ranges:
    """Returns the blocks of every chunk: segments by shares of time, each cut into stages of about equal time.

    Args:
        segments: parts of the model; there must be pp * segments places to cut.
        first, last: times of the first and the last segment, relative to the others'.
        grow: the others grow evenly from the first to the last.
    Raises: ConfigError if there are fewer places.
    """
    with config_errors():
        return tuple(numbers_of(job).cut(segments, first=first, last=last, grow=grow))


def layout_of(job: TrainingJob, ranges: Ranges, bucket_bytes: int, spared: Spared = NOTHING) -> Layout:
    """Returns what the chunks of `ranges` cost, with buckets of at least `bucket_bytes` (cut_buckets).

    Raises: ConfigError when `spared` is said of another number of chunks, or `ranges` are none of the model.
    """
    spared.recompute.of_chunks(len(ranges))
    with config_errors():
        return numbers_of(job).layout(list(ranges), bucket_bytes, core_spared(job, spared))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan of a job, to be simulated."""

    ranges: Ranges
    schedule: str
    """Name, or path of a CSV file."""
    group_size: int | None = None
    modes: Modes | str = "early"
    """Per stage the way of DP.sync of each bucket, or that of all."""
    bucket_bytes: int
    spared: Spared = NOTHING
    early_gathers: int = -1
    """That a stage may begin before its last reduce-scatter is done; -1: any number."""
    gather_order: Orders | None = None
    """Per stage its early buckets in the order of their gathers; None: as the network becomes idle."""

    @staticmethod
    def of(strategy: Strategy) -> Plan:
        """Returns the plan of a strategy, whose gathers are free."""
        return Plan(
            ranges=strategy.ranges,
            schedule=strategy.schedule,
            group_size=strategy.group_size,
            modes=strategy.modes or strategy.dp_sync,
            bucket_bytes=strategy.bucket_bytes,
            spared=Spared.of(strategy.settings),
        )


def simulate(job: TrainingJob, plan: Plan, *, breakdown: bool = False) -> tuple[_C.TrainingStep, list[_C.StageMemory]]:
    """Returns a step of a plan in steady state, and the bytes of each stage over it.

    Args:
        job: with what settings cost (`registry.with_costs`).
    Raises: ConfigError if the parts do not fit each other.
    """
    layout, made = layout_of(job, plan.ranges, plan.bucket_bytes, plan.spared), numbers_of(job)
    modes: Sequence[Sequence[str]]
    if isinstance(plan.modes, str):
        modes = [[plan.modes] * layout.buckets_of(stage, job.pp) for stage in range(job.pp)]
    else:
        modes = plan.modes
    given = schedules.load_csv(plan.schedule) if plan.schedule.endswith(".csv") else None
    order = None if plan.gather_order is None else [list(stage) for stage in plan.gather_order]
    with config_errors():
        return made.run(
            *(layout, plan.schedule, plan.group_size or 0, given, [list(stage) for stage in modes]),
            *(plan.early_gathers, order, breakdown),
        )
