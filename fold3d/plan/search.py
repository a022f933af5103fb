"""search(): the settings with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.placement.partition import split_ranges
from fold3d.plan import candidates
from fold3d.plan.choice import Choice, flags_of
from fold3d.plan.cluster_model import early_gathers_to_try, kind_of
from fold3d.plan.job import Fixed, Job
from fold3d.plan.layout import Layout, Ranges, Shares, cut
from fold3d.plan.simulator import prediction_of
from fold3d.plan.trial import Modes, Order, Trials
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
_KINDS = ("early", "mixed", "zero1", "serial")
_WORTH_A_CHANGE = 0.97
_RUNNERS_UP = 4
_MUCH_WORK = 25_000
"""Compute actions per step of all stages from which the search looks at fewer candidates."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    layout: Layout
    order: Order
    modes: Modes
    early_gathers: int
    step_ns: int
    memory: int
    gather_order: list[list[int]]

    def segments(self, pp: int) -> int:
        return num_segments(len(self.layout.ranges), pp)


class _Search:
    """The candidates tried so far for one job."""

    def __init__(self, job: Job, fixed: Fixed) -> None:
        self.job = job
        self.fixed = fixed
        self.trials = Trials(job)
        self.pool: dict[tuple[object, ...], _Candidate] = {}

    def try_one(self, layout: Layout, order: Order, modes: Modes, early_gathers: int = -1) -> _Candidate:
        key = (layout.ranges, layout.buckets, order, modes, early_gathers)
        if key not in self.pool:
            step = self.trials.run(layout, order, modes, early_gathers=early_gathers)
            memory = self.trials.memory(layout, order, modes)
            self.pool[key] = _Candidate(layout, order, modes, early_gathers, step.step_ns, memory, step.gather_order)
        return self.pool[key]

    def fits(self, candidate: _Candidate) -> bool:
        limit = self.job.memory_limit
        return limit is None or candidate.memory <= limit

    def rank(self, candidate: _Candidate) -> tuple[object, ...]:
        """What is better comes first: fits, fast; if nothing fits, the least memory."""
        return (0, candidate.step_ns) if self.fits(candidate) else (1, candidate.memory, candidate.step_ns)

    def kinds(self) -> list[str]:
        if self.fixed.dp_sync is not None:
            return [self.fixed.dp_sync]
        return ["early"] if self.job.dp == 1 else ["early", "zero1"]

    def try_all(self, layout: Layout, order: Order, limits: Iterable[int], *, mixed: bool = False) -> None:
        """Tries the ways of DP.sync, the early one with each number of early gathers."""
        job = self.job
        if self.fixed.modes is not None:
            for limit in limits:
                self.try_one(layout, order, self.fixed.modes, limit)
            return
        for kind in self.kinds():
            modes = candidates.uniform_modes(job, layout, kind)
            if kind != "early" or job.dp == 1:
                self.try_one(layout, order, modes)
                continue
            for limit in limits:
                tried = self.try_one(layout, order, modes, limit)
                if mixed and limit > 0 and self.fixed.dp_sync is None:
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
        return min(equal, key=lambda c: (c.segments(self.job.pp), _KINDS.index(kind_of(c.modes)), c.step_ns))


def search(job: Job, fixed: Fixed | None = None) -> Choice:
    """Returns the settings with the shortest predicted step among those that `fixed` leaves open.

    Deterministic; takes at most a few seconds; needs no process group, so any rank may call it alone. Of settings that
    are equal to 0.3 % it takes those with fewer segments, and rather early gathers than zero1. If nothing fits into the
    memory limit, it takes what needs least and says so.

    Raises: ConfigError if what is fixed does not fit the model or each other.
    """
    fixed = fixed or Fixed()
    state = _Search(job, fixed)
    counts = candidates.segment_counts(job, fixed)
    actions = 2 * job.pp * max(counts) * job.micro_batches
    few = max(1, round(6 * min(1.0, _MUCH_WORK / 8 / actions)))
    for segments in counts:
        for ranges in _cuts(job, fixed, segments, _SHARES):
            layout = _usual(candidates.layouts(job, fixed, ranges))
            for order in candidates.orders(job, fixed, segments):
                state.try_all(layout, order, _limits(job, layout, 2))
    heuristic = _try_heuristic(state, counts)
    for found in state.best_of(lambda c: (c.segments(job.pp), c.order), few):
        for ranges in _cuts(job, fixed, found.segments(job.pp), _MORE_SHARES):
            for layout in candidates.layouts(job, fixed, ranges):
                state.try_all(layout, found.order, _limits(job, layout, 4))
    for found in state.best_of(lambda c: (c.layout.ranges, c.layout.buckets, c.order), max(1, few // 2)):
        state.try_all(found.layout, found.order, _limits(job, found.layout, 24), mixed=True)
    return _choice(state, state.winner(), heuristic)


def recheck(job: Job, choice: Choice, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> Choice | None:
    """Returns better settings for the times that a run measured, or None if none are better by 3 %.

    The cut, the buckets and their modes stay, so weights and optimizer state stay where they are; schedule, N and the
    order of early gathers may change.

    Args:
        forward_ms, backward_ms: of every chunk, for one micro-batch.
    Raises: ConfigError unless there is one of each per chunk.
    """
    if not len(forward_ms) == len(backward_ms) == len(choice.ranges):
        raise ConfigError(
            f"{len(forward_ms)} forward and {len(backward_ms)} backward times for {len(choice.ranges)} chunks: one each"
        )
    # What an action costs beside its layers was measured with them.
    measured = replace(_with_times(job, choice.ranges, forward_ms, backward_ms), action_seconds=0.0)
    fixed = Fixed(ranges=choice.ranges, bucket_bytes=choice.bucket_bytes, modes=choice.modes)
    if choice.dp_sync == "serial":
        fixed = replace(fixed, dp_sync="serial")
    trials = Trials(measured)
    layout = candidates.layouts(measured, fixed, choice.ranges)[0]
    order = Order(choice.schedule, choice.group_size)
    now = trials.run(layout, order, choice.modes, gather_order=choice.gather_order).step_ns / 1e6
    better = search(measured, fixed)
    return better if better.step_ms < _WORTH_A_CHANGE * now else None


def _cuts(job: Job, fixed: Fixed, segments: int, shares: Sequence[Shares]) -> list[Ranges]:
    """Returns the cuts into so many segments that differ, the even one first."""
    if fixed.ranges is not None:
        job.trace.check_ranges(list(fixed.ranges))
        return [fixed.ranges]
    return list(dict.fromkeys(cut(job, segments, one) for one in shares))


def _usual(layouts: list[Layout]) -> Layout:
    """Returns the layout with small buckets, but not the smallest if there is a choice."""
    return layouts[min(1, len(layouts) - 1)]


def _limits(job: Job, layout: Layout, count: int) -> list[int]:
    return early_gathers_to_try(max(len(layout.of_stage(stage, job.pp)) for stage in range(job.pp)), count)


def _try_heuristic(state: _Search, counts: list[int]) -> _Candidate:
    """Tries what Fold3D would choose: its number of segments, whole segments as buckets, all micro-batches at once."""
    job, fixed = state.job, state.fixed
    segments = candidates.heuristic_segments(job, counts)
    order = candidates.orders(job, fixed, segments)[0]
    layout = candidates.layouts(job, fixed, _cuts(job, fixed, segments, _SHARES[:1])[0])[-1]
    if fixed.modes is not None:
        return state.try_one(layout, order, fixed.modes)
    return state.try_one(layout, order, candidates.uniform_modes(job, layout, state.kinds()[0]))


def _name(state: _Search, candidate: _Candidate) -> str:
    segments = candidate.segments(state.job.pp)
    number = "1 segment" if segments == 1 else f"{segments} segments"
    sync = f", DP.sync {kind_of(candidate.modes)}" if state.job.dp > 1 else ""
    return f"{number}, {candidate.order}{sync}"


def _choice(state: _Search, winner: _Candidate, heuristic: _Candidate) -> Choice:
    job = state.job
    kind = kind_of(winner.modes)
    gather_order = winner.gather_order if kind in ("early", "mixed") else [[] for _ in range(job.pp)]
    planned = winner.gather_order if job.dp > 1 and kind in ("early", "mixed") else None
    step = state.trials.run(winner.layout, winner.order, winner.modes, gather_order=planned, breakdown=True)
    prediction = prediction_of(step, early_gathers=round(step.early_gathers / job.pp) if planned is not None else None)
    others = state.best_of(lambda c: (c.segments(job.pp), c.order), _RUNNERS_UP + 1)
    mine = (winner.segments(job.pp), winner.order)
    runners_up = [(_name(state, c), c.step_ns / 1e6) for c in others if (c.segments(job.pp), c.order) != mine][
        :_RUNNERS_UP
    ]
    runners_up.append((f"Fold3D's heuristic ({_name(state, heuristic)})", heuristic.step_ns / 1e6))
    remarks = []
    if not state.fits(winner):
        remarks.append(
            f"nothing that was tried fits into {text_of_bytes(job.memory_limit or 0)} (setting memory_limit): this "
            f"needs {text_of_bytes(winner.memory)}, the least"
        )
    elif job.memory_limit is not None:
        remarks.append(
            f"needs about {text_of_bytes(winner.memory)} of {text_of_bytes(job.memory_limit)} on the fullest rank"
        )
    if not job.profile.measured:
        remarks.append("layers could not be measured, so times are shares of FLOPs")
    segments = winner.segments(job.pp)
    flags = flags_of(
        segments=segments,
        schedule=winner.order.name,
        group_size=winner.order.group_size,
        dp_sync=kind,
        bucket_bytes=winner.layout.bucket_bytes,
        dp=job.dp,
        limited=job.memory_limit is not None,
    )
    if list(winner.layout.ranges) != split_ranges(job.trace, segments * job.pp):
        flags += " (the model is then cut by FLOPs, here by measured times)"
    return Choice(
        segments=segments,
        ranges=winner.layout.ranges,
        schedule=winner.order.name,
        group_size=winner.order.group_size,
        dp_sync=kind,
        modes=winner.modes,
        gather_order=tuple(tuple(numbers) for numbers in gather_order),
        bucket_bytes=winner.layout.bucket_bytes,
        memory_bytes=winner.memory,
        prediction=prediction,
        name=_name(state, winner),
        flags=flags,
        remarks=tuple(remarks),
        runners_up=tuple(runners_up),
    )


def _with_times(job: Job, ranges: Ranges, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> Job:
    """Returns the job with its layers' times scaled so that each chunk takes what was measured."""
    forward, backward = list(job.profile.forward), list(job.profile.backward)
    last = len(ranges) - 1
    for chunk, (lo, hi) in enumerate(ranges):
        layers = range(lo + (chunk > 0), hi + 1 + (chunk == last))
        for times, measured in ((forward, forward_ms), (backward, backward_ms)):
            whole = sum(times[layer] for layer in layers)
            for layer in layers:
                share = times[layer] / whole if whole > 0 else 1 / len(layers)
                times[layer] = share * measured[chunk] / 1e3
    return replace(job, profile=replace(job.profile, forward=tuple(forward), backward=tuple(backward)))
