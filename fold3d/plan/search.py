"""search(): the settings with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.placement.partition import split_ranges
from fold3d.plan.cluster_model import early_gathers_to_try, kind_of
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.layout import Layout, Shares, cut, layout_of
from fold3d.plan.measured import with_times, without_recomputed
from fold3d.plan.memory.model import StagePeak, peaks_of
from fold3d.plan.memory.spared import Spared
from fold3d.plan.memory.sparing import climb, ladders, lighten
from fold3d.plan.proposal import Proposal
from fold3d.plan.simulator import prediction_of
from fold3d.plan.space import candidates, dp_sync, offload, registry
from fold3d.plan.space.candidates import spared_from
from fold3d.plan.space.offload import OPTIMIZER as OFFLOAD_OPTIMIZER
from fold3d.plan.space.segments import KNOB as SEGMENTS
from fold3d.plan.strategy import MIXED, Modes, Ranges, Strategy, name_of
from fold3d.plan.trial import Order, Trials
from fold3d.topology import num_segments

_SHARES = (Shares(), Shares(first=0.25), Shares(last=0.5), Shares(first=0.5, last=1.3, grow=True))
_MORE_SHARES = (
    *_SHARES,
    Shares(first=0.5),
    Shares(first=1.5),
    Shares(first=0.5, last=0.5),
    Shares(first=0.3, last=1.2, grow=True),
)
_EQUAL = 1.003
"""Steps within this factor are equal: then fewer segments win, and the kinds of DP.sync in this order."""
_KINDS = ("early", MIXED, "zero1", "serial")
_WORTH_A_CHANGE = 0.97
DECISIVE = 1.1
"""Predictions that differ by less leave a knob to real steps that can be left to them: measured layers and links are
right to some percent."""
_RUNNERS_UP = 4
_SPARED_PLANS = 12
"""That the search makes fit into memory, the fastest first."""
_MUCH_WORK = 25_000
"""Compute actions per step of all stages from which the search looks at fewer candidates."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    layout: Layout
    order: Order
    modes: Modes
    early_gathers: int
    step_ns: int
    peaks: tuple[StagePeak, ...]
    gather_order: list[list[int]]

    @property
    def memory(self) -> int:
        """Bytes of the fullest rank."""
        return max(peak.bytes for peak in self.peaks)

    def segments(self, pp: int) -> int:
        return num_segments(len(self.layout.ranges), pp)


class _Search:
    """The candidates tried so far for one job."""

    def __init__(
        self, job: Job, constraints: Constraints, settings: tuple[tuple[str, str], ...], asked: Job | None = None
    ) -> None:
        """Args:
        job: with what `settings` cost.
        asked: without it; where it is said what settings cost.
        """
        self.job, self.asked = job, asked
        self.constraints = constraints
        self.settings = settings
        self.trials = Trials(job)
        self.pool: dict[tuple[object, ...], _Candidate] = {}

    def try_one(self, layout: Layout, order: Order, modes: Modes, early_gathers: int = -1) -> _Candidate:
        key = (layout.ranges, layout.buckets, layout.spared, order, modes, early_gathers)
        if key not in self.pool:
            step = self.trials.run(layout, order, modes, early_gathers=early_gathers)
            memory = peaks_of(self.trials.memory(layout, order, modes, step))
            self.pool[key] = _Candidate(layout, order, modes, early_gathers, step.step_ns, memory, step.gather_order)
        return self.pool[key]

    def fits(self, candidate: _Candidate) -> bool:
        return all(map(self.has_room, candidate.peaks))

    def has_room(self, peak: StagePeak) -> bool:
        """Whether a rank holds so much."""
        limit, pool = self.job.memory_limit, self.job.pool_limit
        return (limit is None or peak.bytes <= limit) and (pool is None or peak.pool <= pool)

    def rank(self, candidate: _Candidate) -> tuple[object, ...]:
        """What is better comes first: fits, fast; if nothing fits, the least memory."""
        return (0, candidate.step_ns) if self.fits(candidate) else (1, candidate.memory, candidate.step_ns)

    def kinds(self) -> Sequence[str]:
        return dp_sync.KNOB.values(self.job, self.constraints, {})

    def try_all(self, layout: Layout, order: Order, limits: Iterable[int], *, mixed: bool = False) -> None:
        """Tries the ways of DP.sync, the early one with each number of early gathers."""
        job = self.job
        if self.constraints.modes is not None:
            for limit in limits:
                self.try_one(layout, order, self.constraints.modes, limit)
            return
        for kind in self.kinds():
            modes = candidates.uniform_modes(job, layout, kind)
            if kind != "early" or job.dp == 1:
                self.try_one(layout, order, modes)
                continue
            for limit in limits:
                tried = self.try_one(layout, order, modes, limit)
                if mixed and limit > 0 and self.constraints.dp_sync is None:
                    self.try_one(layout, order, candidates.mixed_modes(job, layout, tried.gather_order, limit))

    def best_of(self, group: Callable[[_Candidate], object], count: int) -> list[_Candidate]:
        """Returns the best candidate of each group, the best groups first."""
        best: dict[object, _Candidate] = {}
        for candidate in self.pool.values():
            key = group(candidate)
            if key not in best or self.rank(candidate) < self.rank(best[key]):
                best[key] = candidate
        return sorted(best.values(), key=self.rank)[:count]

    def winner(self) -> _Candidate:
        best = min(self.pool.values(), key=self.rank)
        if not self.fits(best):
            return best
        equal = [c for c in self.pool.values() if self.fits(c) and c.step_ns <= best.step_ns * _EQUAL]
        # Gathers that may begin at any time depend least on what was measured being right.
        return min(
            equal,
            key=lambda c: (
                *(not c.layout.spared.nothing, c.segments(self.job.pp)),
                *(_KINDS.index(kind_of(c.modes)), c.step_ns, c.layout.spared.offload.percent),
            ),
        )

    def spare(self) -> None:
        """Makes what is fast, but too large, fit by computing again and by copies to the pool, as far as these are not
        decided. They only add time: what takes longer without them than the fastest that fits is not looked at."""
        if self.job.memory_limit is None:
            return
        fitting = [c.step_ns for c in self.pool.values() if self.fits(c)]
        best = min(fitting, default=None)
        found: dict[object, _Candidate] = {}
        for candidate in sorted(self.pool.values(), key=lambda c: c.step_ns):
            found.setdefault((candidate.segments(self.job.pp), candidate.order, kind_of(candidate.modes)), candidate)
        for candidate in list(found.values())[:_SPARED_PLANS]:
            if best is not None and candidate.step_ns * _EQUAL >= best:
                return
            for ladder in ladders(self.job, self.constraints, len(candidate.layout.ranges)):

                def tried(spared: Spared, like: _Candidate = candidate) -> tuple[int, Sequence[StagePeak]]:
                    nonlocal best
                    layout = layout_of(self.job, like.layout.ranges, like.layout.bucket_bytes, spared)
                    made = self.try_one(layout, like.order, like.modes, like.early_gathers)
                    if self.fits(made) and (best is None or made.step_ns < best):
                        best = made.step_ns
                    return made.step_ns, made.peaks

                climb(ladder, tried, self.has_room, candidate.step_ns)
                if not ladder.steps and offload.KNOB.fixed(self.constraints) is None:
                    lighten(self.job, ladder.spared, tried, self.has_room)


def search(job: Job, constraints: Constraints | None = None) -> Proposal:
    """Returns the settings with the shortest predicted step among those that `constraints` leave open.

    Deterministic; takes at most a few seconds; needs no process group, so any rank may call it alone. Of settings that
    are equal to 0.3 % it takes those with fewer segments, and rather early gathers than zero1. If nothing fits into the
    memory limit, it takes what needs least and says so.

    Raises: ConfigError if what is fixed does not fit the model or each other.
    """
    constraints = constraints or Constraints()
    registry.check(constraints)
    if job.memory_limit is None:  # then what is open of both spares nothing: what depends on the other has no effect
        registry.check(replace(constraints, settings=_with_spared(constraints)))
    found: list[_Found] = []
    for settings in registry.settings_to_try(job, constraints):
        state = _Search(registry.with_costs(job, settings), constraints, settings, job)
        heuristic = _try_all(state)
        found.append(_Found(state, state.winner(), heuristic))
    if not found:
        raise ConfigError("a knob of the registry has no candidates for this job")
    best = min(found, key=lambda one: one.state.rank(one.winner))
    proposal = _proposal(best.state, best.winner, best.heuristic)
    settings, remarks, second_best = _settled(best, found, proposal.strategy.settings)
    return replace(
        proposal,
        strategy=replace(proposal.strategy, settings=settings),
        remarks=(*proposal.remarks, *remarks),
        second_best=second_best,
    )


def _with_spared(constraints: Constraints) -> tuple[tuple[str, str], ...]:
    spared = spared_from(constraints)
    decided = {"recompute": str(spared.recompute), "offload": str(spared.offload)}
    return tuple((dict(constraints.settings) | decided).items())


@dataclass(frozen=True, slots=True)
class _Found:
    """What came out with one combination of settings."""

    state: _Search
    winner: _Candidate
    heuristic: _Candidate


def _settled(
    best: _Found, found: Sequence[_Found], settings: tuple[tuple[str, str], ...]
) -> tuple[tuple[tuple[str, str], ...], list[str], tuple[tuple[str, float], ...]]:
    """Returns the best settings, with what real steps are to decide where predictions are too close; why; and what the
    next best value of each such knob takes.

    Args:
        settings: the best ones.
    """
    settled, remarks, seconds = dict(settings), [], []
    for knob in registry.in_settings(best.state.job.tp):
        if knob.undecided is None:
            continue
        # The search is free to change everything else with it, but not other settings.
        others = [
            one
            for one in found
            if {name for name, text in one.state.settings if text != dict(best.state.settings)[name]} == {knob.name}
            and one.state.fits(one.winner)
        ]
        if not others:
            continue
        second = min(others, key=lambda one: one.winner.step_ns)
        seconds.append((knob.name, second.winner.step_ns / 1e6))
        mine, other = settled[knob.name], dict(second.state.settings)[knob.name]
        close = second.winner.step_ns < DECISIVE * best.winner.step_ns
        if close:
            settled[knob.name] = knob.text(knob.undecided)
        remarks.append(
            f"{knob.name}: {mine} takes {best.winner.step_ns / 1e6:.1f} ms a step, {other} "
            f"{second.winner.step_ns / 1e6:.1f}: " + ("too close to tell, real steps decide" if close else mine)
        )
    return tuple(settled.items()), remarks, tuple(seconds)


def _try_all(state: _Search) -> _Candidate:
    """Tries what is open, first roughly and then around the best; returns what Fold3D's heuristic would take."""
    job, constraints = state.job, state.constraints
    counts = SEGMENTS.values(job, constraints, {})
    actions = 2 * job.pp * max(counts) * job.micro_batches
    few = max(1, round(6 * min(1.0, _MUCH_WORK / 8 / actions)))
    for segments in counts:
        for ranges in _cuts(job, constraints, segments, _SHARES):
            layout = _usual(candidates.layouts(job, constraints, ranges))
            for order in candidates.orders(job, constraints, segments):
                state.try_all(layout, order, _limits(job, layout, 2))
    heuristic = _try_heuristic(state, counts)
    for found in state.best_of(lambda c: (c.segments(job.pp), c.order), few):
        for ranges in _cuts(job, constraints, found.segments(job.pp), _MORE_SHARES):
            for layout in candidates.layouts(job, constraints, ranges):
                state.try_all(layout, found.order, _limits(job, layout, 4))
    for found in state.best_of(lambda c: (c.layout.ranges, c.layout.buckets, c.order), max(1, few // 2)):
        state.try_all(found.layout, found.order, _limits(job, found.layout, 24), mixed=True)
    state.spare()
    return heuristic


def decide(job: Job, constraints: Constraints, steps_parts: Callable[[], bool]) -> Proposal:
    """Returns the best proposal with early gathers, which hide more than the simulator tells (every replica's step of
    its own shard comes before a zero1 gather, not under it); with zero1 in it only where memory asks for it.

    Args:
        steps_parts: whether the optimizer can be used with zero1; asked only where it matters.
    """
    if constraints.dp_sync is not None or job.dp == 1:
        return search(job, constraints)
    early = search(job, replace(constraints, dp_sync="early"))
    fits = job.memory_limit is None or early.memory_bytes <= job.memory_limit
    spares = Spared.of(early.strategy.settings) != spared_from(constraints)
    on_host = OFFLOAD_OPTIMIZER.of(early.strategy)  # where updates take long, rather each replica its share
    return early if (fits and not spares and not on_host) or not steps_parts() else search(job, constraints)


def recheck(
    job: Job,
    strategy: Strategy,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    tp_ms: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Proposal | None:
    """Returns a better strategy for the times that a run measured, or None if none is better by 3 %.

    The cut, the buckets and their modes stay, so weights and optimizer state stay where they are; schedule, N and the
    order of early gathers may change.

    Args:
        forward_ms, backward_ms: of every chunk, for one micro-batch.
        tp_ms: the parts of both in which TP.sync was waited for; None: nobody counts them, the shares stay.
    Raises: ConfigError unless there is one of each per chunk.
    """
    if not len(forward_ms) == len(backward_ms) == strategy.num_chunks:
        raise ConfigError(
            f"{len(forward_ms)} forward and {len(backward_ms)} backward times for {strategy.num_chunks} chunks: "
            "one each"
        )
    # What an action costs beside its layers was measured with them, and so was what settings cost.
    job = registry.with_costs(job, strategy.settings)
    backward_ms = without_recomputed(job, strategy, backward_ms)
    measured = replace(with_times(job, strategy.ranges, forward_ms, backward_ms, tp_ms), action_seconds=0.0)
    constraints = Constraints(
        ranges=strategy.ranges,
        bucket_bytes=strategy.bucket_bytes,
        dp_sync=strategy.dp_sync,
        modes=strategy.modes or None,
        settings=strategy.settings,
    )
    layout = candidates.layouts(measured, constraints, strategy.ranges)[0]
    buckets = [len(layout.of_stage(stage, job.pp)) for stage in range(job.pp)]
    modes = tuple(strategy.modes_of(stage, count) for stage, count in enumerate(buckets))
    gathers = [strategy.gathers_of(stage, count) for stage, count in enumerate(buckets)]
    order = Order(strategy.schedule, strategy.group_size)
    now = Trials(measured).run(layout, order, modes, gather_order=gathers, spans=False).step_ns / 1e6
    state = _Search(measured, constraints, strategy.settings)
    heuristic = _try_all(state)
    better = _proposal(state, state.winner(), heuristic)
    return better if better.step_ms < _WORTH_A_CHANGE * now else None


def _cuts(job: Job, constraints: Constraints, segments: int, shares: Sequence[Shares]) -> list[Ranges]:
    """Returns the cuts into so many segments that differ, the even one first."""
    if constraints.ranges is not None:
        job.trace.check_ranges(list(constraints.ranges))
        return [constraints.ranges]
    return list(dict.fromkeys(cut(job, segments, one) for one in shares))


def _usual(layouts: list[Layout]) -> Layout:
    """Returns the layout with small buckets, but not the smallest if there is a choice."""
    return layouts[min(1, len(layouts) - 1)]


def _limits(job: Job, layout: Layout, count: int) -> list[int]:
    if job.gradient_delay:  # none begins before its step is over
        return [-1]
    return early_gathers_to_try(max(len(layout.of_stage(stage, job.pp)) for stage in range(job.pp)), count)


def _try_heuristic(state: _Search, counts: Sequence[int]) -> _Candidate:
    """Tries what Fold3D would choose: its number of segments, whole segments as buckets, all micro-batches at once."""
    job, constraints = state.job, state.constraints
    segments = candidates.heuristic_segments(job, counts)
    order = candidates.orders(job, constraints, segments)[0]
    layout = candidates.layouts(job, constraints, _cuts(job, constraints, segments, _SHARES[:1])[0])[-1]
    return state.try_one(layout, order, constraints.modes or candidates.uniform_modes(job, layout, state.kinds()[0]))


def _name(state: _Search, candidate: _Candidate) -> str:
    kind = kind_of(candidate.modes) if state.job.dp > 1 else None
    return name_of(candidate.segments(state.job.pp), candidate.order.name, candidate.order.group_size, kind)


def _proposal(state: _Search, winner: _Candidate, heuristic: _Candidate) -> Proposal:
    job = state.job
    kind = kind_of(winner.modes)
    has_early = kind in ("early", MIXED)
    planned = winner.gather_order if job.dp > 1 and has_early else None
    step = state.trials.run(
        winner.layout, winner.order, winner.modes, gather_order=planned, breakdown=True, spans=False
    )
    strategy = Strategy(
        dp=job.dp,
        pp=job.pp,
        tp=job.tp,
        micro_batches=job.micro_batches,
        ranges=winner.layout.ranges,
        schedule=winner.order.name,
        group_size=winner.order.group_size,
        dp_sync=kind,
        modes=winner.modes if kind == MIXED else (),
        gather_order=tuple(tuple(numbers) for numbers in winner.gather_order) if has_early else (),
        bucket_bytes=winner.layout.bucket_bytes,
        settings=winner.layout.spared.into(state.settings),
    )
    return Proposal(
        strategy=strategy,
        prediction=prediction_of(
            step, early_gathers=round(step.early_gathers / job.pp) if planned is not None else None
        ),
        peaks=winner.peaks,
        limited=job.memory_limit is not None,
        cut_by_flops=list(strategy.ranges) == split_ranges(job.trace, strategy.num_chunks),
        remarks=tuple(_remarks(state, winner)),
        runners_up=tuple(_runners_up(state, winner, heuristic)),
    )


def _runners_up(state: _Search, winner: _Candidate, heuristic: _Candidate) -> list[tuple[str, float]]:
    def group(candidate: _Candidate) -> object:
        return candidate.segments(state.job.pp), candidate.order

    def row(name: str, candidate: _Candidate) -> tuple[str, float]:
        larger = state.fits(winner) and not state.fits(candidate)
        return f"{name}, does not fit" if larger else name, candidate.step_ns / 1e6

    others = [one for one in state.best_of(group, _RUNNERS_UP + 1) if group(one) != group(winner)][:_RUNNERS_UP]
    found = [row(_name(state, one), one) for one in others]
    return [*found, row(f"Fold3D's heuristic ({_name(state, heuristic)})", heuristic)]


def _remarks(state: _Search, winner: _Candidate) -> list[str]:
    job, remarks = state.job, []
    pool = max(peak.pool for peak in winner.peaks)
    if job.memory_limit is not None and winner.memory > job.memory_limit:
        remarks.append(
            f"nothing that was tried fits into {text_of_bytes(job.memory_limit)} (setting memory_limit): this "
            f"needs {text_of_bytes(winner.memory)}, the least"
        )
    elif job.pool_limit is not None and pool > job.pool_limit:
        remarks.append(
            f"nothing that was tried fits into a pool of {text_of_bytes(job.pool_limit)} (setting offload_pool): this "
            f"puts {text_of_bytes(pool)} there"
        )
    elif job.memory_limit is not None:
        remarks.append(
            f"needs about {text_of_bytes(winner.memory)} of {text_of_bytes(job.memory_limit)} on the fullest rank"
        )
    remarks += [*_traded(state, winner), *_on_host(state, winner)]
    if not job.profile.measured:
        remarks.append("layers were not measured: times are shares of FLOPs")
    return remarks


def _traded(state: _Search, winner: _Candidate) -> list[str]:
    """Returns what is computed again or copied to the pool, what that costs, and what it is for."""
    spared = spared_from(state.constraints)
    if spared == winner.layout.spared:
        return []
    plain = layout_of(state.job, winner.layout.ranges, winner.layout.bucket_bytes, spared)
    without = state.try_one(plain, winner.order, winner.modes, winner.early_gathers)
    stage = max(range(len(without.peaks)), key=lambda number: without.peaks[number].bytes)
    slower = 100 * (winner.step_ns / without.step_ns - 1)
    saved = without.peaks[stage].bytes - winner.peaks[stage].bytes
    pool = max(peak.pool for peak in winner.peaks)
    return [
        f"{winner.layout.spared} costs {slower:.1f} % of a step and saves {text_of_bytes(saved)} on stage {stage}: "
        f"without it stage {stage} needs {text_of_bytes(without.peaks[stage].bytes)} of "
        f"{text_of_bytes(state.job.memory_limit or 0)}"
        + (f"; the pool of a rank holds up to {text_of_bytes(pool)}" if pool else "")
    ]


def _on_host(state: _Search, winner: _Candidate) -> list[str]:
    """Returns what an optimizer in host memory costs, and what it is for."""
    asked = state.asked
    if asked is None or not state.job.offload_optimizer:
        return []
    settings = tuple((name, "False" if name == OFFLOAD_OPTIMIZER.name else text) for name, text in state.settings)
    job = registry.with_costs(asked, settings)
    layout = layout_of(job, winner.layout.ranges, winner.layout.bucket_bytes, winner.layout.spared)
    search = _Search(job, state.constraints, settings)
    without = search.try_one(layout, winner.order, winner.modes, winner.early_gathers)
    stage = max(range(len(winner.peaks)), key=lambda number: winner.peaks[number].host)
    return [
        f"offload_optimizer=True costs {100 * (winner.step_ns / without.step_ns - 1):.1f} % of a step and keeps "
        f"{text_of_bytes(winner.peaks[stage].host)} of stage {stage} in host memory: on its device stage {stage} "
        f"needs {text_of_bytes(winner.peaks[stage].bytes)}, without it {text_of_bytes(without.peaks[stage].bytes)}"
    ]
