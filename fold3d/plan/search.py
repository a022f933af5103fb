"""search(): the settings with the shortest simulated step, found by csrc/core/plan; what they cost, in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.placement.partition import split_ranges
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import Plan, core_spared, layout_of, numbers_of, simulate, spared_of_core
from fold3d.plan.measured import with_times, without_recomputed
from fold3d.plan.memory import Spared, StagePeak, peaks_of
from fold3d.plan.proposal import Proposal
from fold3d.plan.simulator import prediction_of
from fold3d.plan.space import dp_sync, offload, recompute, registry
from fold3d.plan.space.offload import OPTIMIZER as OFFLOAD_OPTIMIZER
from fold3d.plan.strategy import MIXED, Constraints, Strategy, name_of
from fold3d.schedule.library import config_errors
from fold3d.topology import num_segments

DECISIVE = 1.1
"""Predictions that differ by less leave a knob to real steps that can be left to them: measured layers and links are
right to some percent."""
_WORTH_A_CHANGE = 0.97
_RUNNERS_UP = 4

Settings = tuple[tuple[str, str], ...]
PlanProgress = _C.PlanProgress
Progress = Callable[[int, PlanProgress], None]
"""Called between rounds of a search with the number of the job whose plan is the best so far, -1 where none fits yet;
what it raises ends the search."""


def search(job: TrainingJob, constraints: Constraints | None = None, *, progress: Progress | None = None) -> Proposal:
    """Returns the settings with the shortest predicted step among those that `constraints` leave open.

    Deterministic; uses all cores; needs no process group, so any rank may call it alone. Of settings that are equal to
    0.1 % it takes those with fewer segments, and rather early gathers than zero1. If nothing fits into the memory
    limit, it takes what needs least and says so.

    Raises: ConfigError if what is fixed does not fit the model or each other.
    """
    found = search_jobs([job], constraints, progress=progress)[0]
    if found.winner is None:
        raise ConfigError(found.cannot)
    return found.proposal()


def search_jobs(
    jobs: Sequence[TrainingJob],
    constraints: Constraints | None = None,
    *,
    beat_ms: float | None = None,
    progress: Progress | None = None,
) -> list[Found]:
    """Returns what is best for each of several jobs of which one is to be chosen: those with the same work on other
    meshes, say. A job of which bounds say that another one has a faster plan has no winner.

    Args:
        beat_ms: a step of what is known already.
    Raises: ConfigError for constraints that do not fit each other.
    """
    constraints = constraints or Constraints()
    registry.check(constraints)
    variants: list[tuple[int, Settings, TrainingJob]] = []
    for number, job in enumerate(jobs):
        if (
            job.memory_limit is None
        ):  # then what is open of both spares nothing: what depends on the other has no effect
            registry.check(replace(constraints, settings=_with_spared(constraints)))
        _check(job, constraints)
        for settings in registry.settings_to_try(job, constraints):
            variants.append((number, settings, registry.with_costs(job, settings)))
    return _search(jobs, constraints, variants, beat_ms, progress)


def _search(
    jobs: Sequence[TrainingJob],
    constraints: Constraints,
    variants: Sequence[tuple[int, Settings, TrainingJob]],
    beat_ms: float | None = None,
    progress: Progress | None = None,
) -> list[Found]:
    """Returns what is best for each job.

    Args:
        variants: number of a job, settings, the job with what they cost.
    """
    if not variants:
        raise ConfigError("a knob of the registry has no candidates for this job")
    space = _space(jobs[0], constraints)

    def tell(state: _C.PlanProgress) -> None:
        if progress is not None:
            progress(variants[state.job][0] if state.job >= 0 else -1, state)

    with config_errors():
        plans = _C.search_plans(
            [numbers_of(job) for _, _, job in variants],
            space,
            beat_ns=None if beat_ms is None else round(beat_ms * 1e6),
            threads=len(os.sched_getaffinity(0)),
            progress=tell,
        )
    results = []
    for number, job in enumerate(jobs):
        mine = [
            _Variant(settings, costed, plan)
            for (of, settings, costed), plan in zip(variants, plans, strict=True)
            if of == number
        ]
        results.append(Found(job, constraints, space, mine))
    return results


def _check(job: TrainingJob, constraints: Constraints) -> None:
    """Raises: ConfigError for what is fixed and does not fit the model."""
    schedules.check_group_size(constraints.group_size)
    if constraints.ranges is not None:
        job.trace.check_ranges(list(constraints.ranges))
        spared_from(constraints).recompute.of_chunks(len(constraints.ranges))
    elif constraints.segments is not None:
        spared_from(constraints).recompute.of_chunks(constraints.segments * job.pp)


def spared_from(constraints: Constraints) -> Spared:
    """Returns what the user has decided to recompute and to offload; nothing where they have not."""
    again, leaves = recompute.KNOB.fixed(constraints), offload.KNOB.fixed(constraints)
    nothing = Spared()
    return Spared(again or nothing.recompute, leaves or nothing.offload)


def _with_spared(constraints: Constraints) -> Settings:
    spared = spared_from(constraints)
    decided = {"recompute": str(spared.recompute), "offload": str(spared.offload)}
    return tuple((dict(constraints.settings) | decided).items())


def _space(job: TrainingJob, constraints: Constraints) -> _C.PlanSpace:
    """Returns what is fixed, and what is to be tried of the rest."""
    options, name = _C.PlanSpace(), constraints.schedule
    options.segments = constraints.segments
    if constraints.ranges is not None:
        options.ranges, options.segments = list(constraints.ranges), None
    options.schedule, options.group_size = name or "", constraints.group_size or 0
    if name is not None and name.endswith(".csv"):
        given = schedules.load_csv(name)
        options.give(given)
        if constraints.ranges is None and constraints.segments is None:
            options.segments = given.segments
    if constraints.modes is not None:
        options.set_modes([list(stage) for stage in constraints.modes])
    elif constraints.dp_sync is None:
        options.set_ways(["early", "zero1"], True)
    else:
        options.set_ways([constraints.dp_sync], False)
    options.bucket_bytes = list(dp_sync.BUCKET_BYTES.values(job, constraints))
    again, leaves = recompute.KNOB.fixed(constraints), offload.KNOB.fixed(constraints)
    options.set_spared(core_spared(job, spared_from(constraints)), again is None, leaves is None)
    return options


@dataclass(frozen=True, slots=True)
class _Variant:
    """What came out with one combination of settings."""

    settings: Settings
    job: TrainingJob
    """With what they cost."""
    plan: _C.PlanFound


@dataclass(frozen=True, slots=True)
class Found:
    """What a search says of a job."""

    job: TrainingJob
    constraints: Constraints
    space: _C.PlanSpace
    variants: list[_Variant]

    @property
    def winner(self) -> _Variant | None:
        """The best settings; None where no plan can be, or another job has a faster one."""
        known = [one for one in self.variants if one.plan.best is not None]
        return min(known, key=_rank) if known else None

    @property
    def best(self) -> _C.PlanCandidate | None:
        """The plan of the winner."""
        return None if self.winner is None else self.winner.plan.best

    @property
    def fits(self) -> bool:
        """Whether that keeps to the limits."""
        return self.winner is not None and self.winner.plan.fits

    @property
    def memory_bytes(self) -> int:
        """What the fullest rank of `best` needs."""
        winner = self.winner
        assert winner is not None and winner.plan.best is not None, "asked for by those who looked"
        if winner.plan.best.peaks:
            return max(peak.bytes for peak in winner.plan.best.peaks)
        plan = _plan_of(winner.job, winner.plan.best, spared_from(self.constraints))
        return max(peak.bytes for peak in peaks_of(simulate(winner.job, plan)[1]))

    @property
    def cannot(self) -> str:
        """Why no plan is possible; empty where there are some."""
        return next((one.plan.refused for one in self.variants if one.plan.refused), "") if self.best is None else ""

    @property
    def least_ms(self) -> float:
        """No plan of the job takes less."""
        return min(one.plan.least_ns for one in self.variants) / 1e6

    def proposal(self) -> Proposal:
        """Returns the winner, with what it costs."""
        best = self.winner
        assert best is not None and best.plan.best is not None, "asked for by those who looked"
        constraints, job, found = self.constraints, best.job, best.plan.best
        plan = _plan_of(job, found, spared_from(constraints))
        has_early = found.kind in ("early", MIXED)
        order = tuple(tuple(numbers) for numbers in found.gather_order)
        planned = order if job.dp > 1 and has_early else None
        step, curves = simulate(job, replace(plan, gather_order=planned), breakdown=True)
        _, free_curves = simulate(job, plan) if planned is not None else (step, curves)
        peaks = peaks_of(free_curves)
        settings, remarks, second_best = self._settled(best, plan.spared.into(best.settings))
        strategy = Strategy(
            dp=job.dp,
            pp=job.pp,
            tp=job.tp,
            micro_batches=job.micro_batches,
            ranges=plan.ranges,
            schedule=plan.schedule,
            group_size=plan.group_size,
            dp_sync=found.kind,
            modes=tuple(tuple(stage) for stage in found.modes) if found.kind == MIXED else (),
            gather_order=order if has_early else (),
            bucket_bytes=plan.bucket_bytes,
            settings=settings,
        )
        early = round(step.early_gathers / job.pp) if planned is not None else None
        traded = [*self._traded(best, plan, peaks), *self._on_host(best, plan, peaks)]
        times = [] if job.profile.measured else ["layers were not measured: times are shares of FLOPs"]
        return Proposal(
            strategy=strategy,
            prediction=prediction_of(step, early_gathers=early),
            peaks=peaks,
            limited=job.memory_limit is not None,
            cut_by_flops=list(strategy.ranges) == split_ranges(job.trace, strategy.num_chunks),
            remarks=(*_on_limits(job, peaks), *traded, *times, *remarks),
            runners_up=self._runners_up(best),
            second_best=second_best,
        )

    def _settled(self, best: _Variant, settings: Settings) -> tuple[Settings, list[str], tuple[tuple[str, float], ...]]:
        """Returns the best settings, with what real steps are to decide where predictions are too close; why; and what
        the next best value of each such knob takes.

        Args:
            settings: the best ones.
        """
        settled, remarks, seconds = dict(settings), [], []
        assert best.plan.best is not None
        best_ns = best.plan.best.step_ns
        plan = _plan_of(best.job, best.plan.best, spared_from(self.constraints))
        for knob in registry.in_settings(best.job.tp):
            if knob.undecided is None:
                continue
            mine = dict(best.settings)[knob.name]
            others = []
            for one in self.variants:
                differ = {name for name, text in one.settings if text != dict(best.settings)[name]}
                if differ != {knob.name}:  # everything else may change with it, but not other settings
                    continue
                if one.plan.best is not None and one.plan.fits:
                    others.append((one.plan.best.step_ns, dict(one.settings)[knob.name]))
                elif one.plan.best is None:  # bounds say that it is slower: by how much, the same plan tells
                    others.append((simulate(one.job, plan)[0].step_ns, dict(one.settings)[knob.name]))
            if not others:
                continue
            second_ns, other = min(others)
            seconds.append((knob.name, second_ns / 1e6))
            close = second_ns < DECISIVE * best_ns
            if close:
                settled[knob.name] = knob.text(knob.undecided)
            remarks.append(
                f"{knob.name}: {mine} takes {best_ns / 1e6:.1f} ms a step, {other} {second_ns / 1e6:.1f}: "
                + ("too close to tell, real steps decide" if close else mine)
            )
        return tuple(settled.items()), remarks, tuple(seconds)

    def _runners_up(self, best: _Variant) -> tuple[tuple[str, float], ...]:
        def row(name: str, fits: bool, step_ns: int) -> tuple[str, float]:
            larger = best.plan.fits and not fits
            return f"{name}, does not fit" if larger else name, step_ns / 1e6

        job = best.job
        found = []
        for one in best.plan.runners_up[:_RUNNERS_UP]:
            kind = one.kind if job.dp > 1 else None
            name = name_of(one.segments, one.schedule, one.group_size or None, kind)
            found.append(row(name, one.fits, one.step_ns))
        with config_errors():
            usual = self.space.heuristic(numbers_of(job))
        segments = num_segments(len(usual.layout.ranges), job.pp)
        name = name_of(segments, usual.schedule, usual.group_size or None, usual.kind if job.dp > 1 else None)
        return (*found, row(f"Fold3D's heuristic ({name})", _fits(job, usual.peaks), usual.step_ns))

    def _traded(self, best: _Variant, plan: Plan, peaks: Sequence[StagePeak]) -> list[str]:
        """Returns what is computed again or copied to the pool, what that costs, and what it is for."""
        spared, job = spared_from(self.constraints), best.job
        if spared == plan.spared or best.plan.best is None:
            return []
        step, curves = simulate(job, replace(plan, spared=spared))
        without = peaks_of(curves)
        stage = max(range(len(without)), key=lambda number: without[number].bytes)
        slower = 100 * (best.plan.best.step_ns / step.step_ns - 1)
        saved = without[stage].bytes - peaks[stage].bytes
        pool = max(peak.pool for peak in peaks)
        return [
            f"{plan.spared} costs {slower:.1f} % of a step and saves {text_of_bytes(saved)} on stage {stage}: "
            f"without it stage {stage} needs {text_of_bytes(without[stage].bytes)} of "
            f"{text_of_bytes(job.memory_limit or 0)}"
            + (f"; the pool of a rank holds up to {text_of_bytes(pool)}" if pool else "")
        ]

    def _on_host(self, best: _Variant, plan: Plan, peaks: Sequence[StagePeak]) -> list[str]:
        """Returns what an optimizer in host memory costs, and what it is for."""
        if not best.job.offload_optimizer or best.plan.best is None:
            return []
        settings = tuple((name, "False" if name == OFFLOAD_OPTIMIZER.name else text) for name, text in best.settings)
        step, curves = simulate(registry.with_costs(self.job, settings), plan)
        without = peaks_of(curves)
        stage = max(range(len(peaks)), key=lambda number: peaks[number].host)
        return [
            f"offload_optimizer=True costs {100 * (best.plan.best.step_ns / step.step_ns - 1):.1f} % of a step and "
            f"keeps {text_of_bytes(peaks[stage].host)} of stage {stage} in host memory: on its device stage {stage} "
            f"needs {text_of_bytes(peaks[stage].bytes)}, without it {text_of_bytes(without[stage].bytes)}"
        ]


def _rank(one: _Variant) -> tuple[int, int, int]:
    """What is better comes first: fits, fast; if nothing fits, the least memory."""
    best = one.plan.best
    assert best is not None
    if one.plan.fits:
        return 0, best.step_ns, 0
    return 1, max(peak.bytes for peak in best.peaks), best.step_ns


def _plan_of(job: TrainingJob, found: _C.PlanCandidate, fixed: Spared) -> Plan:
    return Plan(
        ranges=tuple(found.layout.ranges),
        schedule=found.schedule,
        group_size=found.group_size or None,
        modes=tuple(tuple(stage) for stage in found.modes),
        bucket_bytes=found.layout.bucket_bytes,
        spared=spared_of_core(job, found.spared, fixed),
        early_gathers=found.early_gathers,
    )


def _fits(job: TrainingJob, peaks: Sequence[_C.PlanPeak]) -> bool:
    limit, pool = job.memory_limit, job.pool_limit
    return all((limit is None or one.bytes <= limit) and (pool is None or one.pool <= pool) for one in peaks)


def _on_limits(job: TrainingJob, peaks: Sequence[StagePeak]) -> list[str]:
    memory, pool = max(peak.bytes for peak in peaks), max(peak.pool for peak in peaks)
    if job.memory_limit is not None and memory > job.memory_limit:
        return [
            f"nothing that was tried fits into {text_of_bytes(job.memory_limit)} (setting memory_limit): this "
            f"needs {text_of_bytes(memory)}, the least"
        ]
    if job.pool_limit is not None and pool > job.pool_limit:
        return [
            f"nothing that was tried fits into a pool of {text_of_bytes(job.pool_limit)} (setting offload_pool): this "
            f"puts {text_of_bytes(pool)} there"
        ]
    if job.memory_limit is not None:
        return [f"needs about {text_of_bytes(memory)} of {text_of_bytes(job.memory_limit)} on the fullest rank"]
    return []


def decide(
    job: TrainingJob, constraints: Constraints, steps_parts: Callable[[], bool], *, progress: Progress | None = None
) -> Proposal:
    """Returns the best proposal with early gathers, which hide more than the simulator tells (every replica's step of
    its own shard comes before a zero1 gather, not under it); with zero1 in it only where memory asks for it.

    Args:
        steps_parts: whether the optimizer can be used with zero1; asked only where it matters.
    """
    found = decide_jobs([job], constraints, steps_parts, progress=progress)[0]
    if found.winner is None:
        raise ConfigError(found.cannot)
    return found.proposal()


def decide_jobs(
    jobs: Sequence[TrainingJob],
    constraints: Constraints,
    steps_parts: Callable[[], bool],
    *,
    progress: Progress | None = None,
) -> list[Found]:
    """Returns what `decide` would of each of several jobs, as `search_jobs`."""
    if constraints.dp_sync is not None:
        return search_jobs(jobs, constraints, progress=progress)
    early = replace(constraints, dp_sync="early")
    found = search_jobs(jobs, early, progress=progress)
    best_ms = min((one.best.step_ns / 1e6 for one in found if one.best is not None and one.fits), default=inf)
    # Of those that lost by bounds nobody knows whether memory, which zero1 needs less of, was the reason.
    lost = {n for n, one in enumerate(found) if jobs[n].dp > 1 and _may_have_lost_by_memory(one, best_ms)}
    asking = [n for n, one in enumerate(found) if n in lost or (jobs[n].dp > 1 and _asks_for_zero1(one))]
    if not asking or not steps_parts():
        return found

    def tell(job: int, state: _C.PlanProgress) -> None:
        if progress is not None:
            progress(asking[job] if job >= 0 else -1, state)

    beat_ms = None if best_ms == inf else best_ms
    again = search_jobs([jobs[number] for number in asking], constraints, beat_ms=beat_ms, progress=tell)
    for number, one in zip(asking, again, strict=True):
        before = found[number].winner
        if one.winner is not None and (before is None or _rank(one.winner) < _rank(before)):
            found[number] = one
    while lost:
        known = {n: one.best.step_ns for n, one in enumerate(found) if one.best is not None and one.fits}
        best = min(known, key=lambda n: known[n], default=-1)
        if best not in lost:
            break
        lost.remove(best)
        alone = search_jobs([jobs[best]], early, progress=progress)[0]
        if alone.winner is not None and not _asks_for_zero1(alone):
            found[best] = alone
    return found


def _may_have_lost_by_memory(found: Found, best_ms: float) -> bool:
    limited = found.job.memory_limit is not None
    return limited and found.winner is None and not found.cannot and found.least_ms < best_ms


def _asks_for_zero1(found: Found) -> bool:
    """Whether early gathers do not fit, or only with what costs time."""
    best = found.winner
    if best is None or best.plan.best is None:
        return False
    spared = spared_of_core(best.job, best.plan.best.spared, spared_from(found.constraints))
    on_host = best.job.offload_optimizer  # where updates take long, rather each replica its share
    return not best.plan.fits or spared != spared_from(found.constraints) or on_host


def recheck(
    job: TrainingJob,
    strategy: Strategy,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    tp_ms: tuple[Sequence[float], Sequence[float]] | None = None,
    others: Sequence[TrainingJob] = (),
) -> Proposal | None:
    """Returns a better strategy for the times that a run measured, or None if none is better by 3 %.

    The cut, the buckets and their modes stay, so weights and optimizer state stay where they are; schedule, N, the
    order of early gathers and the size of micro-batches may change.

    Args:
        job: as it runs.
        forward_ms, backward_ms: of every chunk, for one micro-batch.
        tp_ms: the parts of both in which TP.sync was waited for; None: nobody counts them, the shares stay.
        others: the job in micro-batches of other sizes, which may be taken as well; the proposal then says the size.
    Raises: ConfigError unless there is one of each time per chunk.
    """
    if not len(forward_ms) == len(backward_ms) == strategy.num_chunks:
        raise ConfigError(
            f"{len(forward_ms)} forward and {len(backward_ms)} backward times for {strategy.num_chunks} chunks: "
            "one each"
        )
    plan, jobs = Plan.of(strategy), [registry.with_costs(one, strategy.settings) for one in (job, *others)]
    backward_ms = without_recomputed(jobs[0], strategy, backward_ms)
    # What an action costs beside its layers was measured with them, and so were what settings cost and what bytes on
    # their way delay.
    action_ms = 1e3 * job.action_seconds
    predicted = [layout_of(one, strategy.ranges, strategy.bucket_bytes) for one in jobs]
    measured = []
    for one, layout in zip(jobs, predicted, strict=True):
        times = []
        for ms, mine, its in (
            (forward_ms, predicted[0].forward, layout.forward),
            (backward_ms, predicted[0].backward, layout.backward),
        ):
            shares = [b / a if a > 0 else 1.0 for a, b in zip(mine, its, strict=True)]
            alike = layout is predicted[0]
            times.append(
                [t if alike else max(0.0, t - action_ms) * s + action_ms for t, s in zip(ms, shares, strict=True)]
            )
        timed = with_times(one, strategy.ranges, times[0], times[1], tp_ms)
        network = replace(timed.network, toll=0.0)
        measured.append(replace(timed, network=network, action_seconds=0.0, stage_times=()))
    layout = layout_of(measured[0], plan.ranges, plan.bucket_bytes, plan.spared)
    gathers = tuple(tuple(strategy.gathers_of(stage, layout.buckets_of(stage, job.pp))) for stage in range(job.pp))
    now = simulate(measured[0], replace(plan, gather_order=gathers))[0].step_ns
    variants = [(number, strategy.settings, one) for number, one in enumerate(measured)]
    found = _search(measured, Constraints.of(strategy, keeps_order=False), variants)
    if all(one.winner is None for one in found):
        raise ConfigError(found[0].cannot)
    numbers = [number for number, one in enumerate(found) if one.best is not None and (one.fits or not number)]
    best = min(numbers, key=lambda number: _step_ns(found[number]))
    if 0 in numbers and _step_ns(found[best]) >= _WORTH_A_CHANGE * _step_ns(found[0]):
        best = 0  # the size stays where it hardly matters
    if _step_ns(found[best]) >= _WORTH_A_CHANGE * now:
        return None
    return replace(found[best].proposal(), micro_batch_size=measured[best].samples if others else None)


def _step_ns(found: Found) -> int:
    assert found.best is not None, "asked for by those who looked"
    return found.best.step_ns
