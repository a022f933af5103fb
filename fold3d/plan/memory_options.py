"""cheapest_changes(): what else could be set so that a run needs less memory, and what each costs in time; and
usual_changes(), where nobody has planned anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fold3d import _C
from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.offload import Offload
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import Plan, cut, simulate
from fold3d.plan.memory import Spared, peaks_of
from fold3d.plan.micro_batch_size import in_parts, sizes_of
from fold3d.plan.space import offload, registry
from fold3d.plan.strategy import Strategy
from fold3d.recompute import Recompute
from fold3d.schedule import only_segments
from fold3d.topology import LOOP

_LESS = 0.98
"""Of the memory: what saves less is no help."""
_NAMED = 3
"""Changes that a message has room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Another setting, and what the memory model and the simulator say of it."""

    setting: str
    bytes: int
    """Of the fullest rank."""
    slower: float
    """By which part a step takes longer; negative: it is shorter."""

    def __str__(self) -> str:
        return f"{self.setting}: {text_of_bytes(self.bytes)}, a step takes {100 * self.slower:+.0f} %"


def cheapest_changes(job: TrainingJob, strategy: Strategy, count: int = _NAMED) -> list[Change]:
    """Returns the changes of one setting with which the fullest rank needs less, the fastest first.

    Args:
        job: what the planner was told.
        strategy: what runs.
    """
    asked, job, plan = job, registry.with_costs(job, strategy.settings), Plan.of(strategy)
    now_bytes, now_ns = _cost(job, plan)
    found = []
    for setting, other, its in (*_others(job, strategy, plan), *_smaller(asked, strategy, plan)):
        try:
            size, step_ns = _cost(other, its)
        except ConfigError:  # such a schedule there is not
            continue
        if size < _LESS * now_bytes:
            found.append(Change(setting=setting, bytes=size, slower=step_ns / now_ns - 1))
    return sorted(found, key=lambda change: change.slower)[:count]


def usual_changes(strategy: Strategy, dp: int, *, pool_is_elsewhere: bool, divides: bool) -> list[str]:
    """Returns what usually helps, the cheapest first, and how to know what it costs; for where no job was planned.

    Args:
        strategy: what runs.
        pool_is_elsewhere: whether what leaves the device takes none of its memory.
        divides: whether micro-batches are divided already.
    """
    spared, found = Spared.of(strategy.settings), []
    if dp > 1 and strategy.dp_sync != "zero1":
        found.append('dp_sync="zero1": each replica keeps its share of the optimizer\'s state')
    if pool_is_elsewhere and spared.offload.nothing:
        found.append('offload="activations": what forwards keep waits in host memory, copies run beside the step')
    if spared.recompute.nothing:
        found.append('recompute="blocks": a block keeps its input, and its forward runs twice')
    if strategy.segments > 1:
        found.append('segments=1, schedule="1f1b": fewer micro-batches are under way at once')
    if not divides:
        found.append("micro_batch_size=1: a sample of a micro-batch after the other")
    return [*found[:_NAMED], 'memory_limit (such as "8GB"): has all of this planned, and says what it costs']


def predicted_curves(job: TrainingJob, strategy: Strategy) -> list[_C.StageMemory]:
    """Returns the bytes of each stage over a step of `strategy`.

    Args:
        job: what the planner is told.
    """
    return simulate(registry.with_costs(job, strategy.settings), Plan.of(strategy))[1]


_Other = tuple[str, TrainingJob, Plan]


def _others(job: TrainingJob, strategy: Strategy, plan: Plan) -> Iterator[_Other]:
    spared = plan.spared
    for other in _spared(job, strategy, spared):
        yield str(other), job, replace(plan, spared=other)
    if job.host_is_elsewhere and not job.offload_optimizer:
        yield "offload_optimizer=True", offload.optimizer_costs(job, True), plan
    if job.dp > 1 and strategy.dp_sync != "zero1":
        yield 'dp_sync="zero1"', job, replace(plan, modes="zero1")
    if strategy.schedule != "1f1b" and len(spared.recompute.choices) == 1:
        way = strategy.dp_sync if not strategy.modes else "zero1"
        alone = replace(plan, ranges=cut(job, 1), schedule="1f1b", group_size=None, modes=way)
        yield 'segments=1, schedule="1f1b"', replace(job, style=LOOP), alone
    if strategy.segments > 1 and only_segments(strategy.schedule) is None and strategy.schedule != "interleaved":
        yield 'schedule="interleaved"', job, replace(plan, schedule="interleaved", group_size=None)


def _smaller(asked: TrainingJob, strategy: Strategy, plan: Plan) -> Iterator[_Other]:
    """Yields smaller micro-batches.

    Args:
        asked: without what settings cost.
    """
    if asked.samples == 1 or plan.schedule.endswith(".csv"):  # which is for so many micro-batches
        return
    if asked.samples is None:  # whatever there is, half of it
        half = in_parts(replace(asked, samples=2), 1)
        setting = f"twice as many micro-batches of half the size (micro_batches={half.micro_batches})"
    else:
        half = in_parts(asked, sizes_of(asked.samples)[1])
        setting = f"micro_batch_size={half.samples}"
    yield setting, registry.with_costs(half, strategy.settings), plan


def _spared(job: TrainingJob, strategy: Strategy, spared: Spared) -> Iterator[Spared]:
    """Yields what recomputes or offloads more."""
    chunks = strategy.num_chunks
    full = Recompute.read("full")
    if spared.recompute != full:
        yield replace(spared, recompute=full)
    if spared.recompute.nothing and chunks > job.pp:
        first = "/".join("full" if chunk < chunks - job.pp else "none" for chunk in range(chunks))
        yield replace(spared, recompute=Recompute.read(first))
    if job.pool_is_elsewhere and spared.offload != Offload("activations"):
        yield replace(spared, offload=Offload("activations"))


def _cost(job: TrainingJob, plan: Plan) -> tuple[int, int]:
    """Returns the bytes of the fullest rank and the nanoseconds of a step."""
    step, curves = simulate(job, plan)
    return max(peak.bytes for peak in peaks_of(curves)), step.step_ns
