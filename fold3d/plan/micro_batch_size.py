"""micro_batch_size: what a job costs whose micro-batches are divided (in_parts), and how many samples pass the model at
once (search_sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.plan.costs import Exchanges, LayerBytes, Profile
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import Plan, simulate
from fold3d.plan.memory import Spared
from fold3d.plan.proposal import Proposal
from fold3d.plan.space import registry
from fold3d.plan.strategy import Strategy


def in_parts(job: TrainingJob, size: int) -> TrainingJob:
    """Returns the job whose micro-batches run in parts of `size` samples, one after the other.

    A part of b samples takes a + c * b: seconds and bytes lie on the line through those of one sample and those of all
    (`one_sample` and `profile` of the job). Kernels that are too small to fill a device take about as long with a few
    samples as with one, so between the two the line is on the safe side. Where one sample was not looked at, or times
    are shares of FLOPs, a is 0.

    Raises:
        ValueError: for a size that is not between 1 and the job's.
    """
    if job.samples is None or not 1 <= size <= job.samples:
        raise ValueError(f"parts of {size} samples of micro-batches of {job.samples}")
    if size == job.samples:
        return job
    parts = -(-job.samples // size)
    profile = _between(job.one_sample, job.profile, job.samples, size)
    return replace(job, micro_batches=parts * job.micro_batches, samples=size, profile=profile)


def _between(one: Profile | None, whole: Profile, samples: int, size: int) -> Profile:
    """Returns the costs of `size` samples."""
    share = _Sum(0.0, size / samples)
    line = share if one is None else _Sum(1 - (size - 1) / (samples - 1), (size - 1) / (samples - 1))
    one = whole if one is None else one
    times = line if one.measured and whole.measured else share
    halves = size > 1 and whole.halves_factor is not None
    return replace(
        whole,
        forward=times.seconds(one.forward, whole.forward),
        backward=times.seconds(one.backward, whole.backward),
        layers=line.layers(one.layers, whole.layers),
        activation_bytes=tuple(map(line.bytes, one.activation_bytes, whole.activation_bytes)),
        tp_forward=line.exchanges(one.tp_forward, whole.tp_forward),
        tp_backward=line.exchanges(one.tp_backward, whole.tp_backward),
        halves_factor=whole.halves_factor if halves else None,
        sub_micro_batches=min(whole.sub_micro_batches, size) if halves else 2,
        inside=tuple(
            replace(b, layers=line.layers(a.layers, b.layers), seconds=times.seconds(a.seconds, b.seconds))
            for a, b in zip(one.inside, whole.inside, strict=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Sum:
    """How much of what one sample takes and how much of what all take a part takes."""

    of_one: float
    of_whole: float

    def seconds(self, one: Sequence[float], whole: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.of_one * a + self.of_whole * b for a, b in zip(one, whole, strict=True))

    def bytes(self, one: int, whole: int) -> int:
        return round(self.of_one * one + self.of_whole * whole)

    def layers(self, one: Sequence[LayerBytes], whole: Sequence[LayerBytes]) -> tuple[LayerBytes, ...]:
        return tuple(
            LayerBytes(**{f.name: self.bytes(getattr(a, f.name), getattr(b, f.name)) for f in fields(LayerBytes)})
            for a, b in zip(one, whole, strict=True)
        )

    def exchanges(self, one: Exchanges, whole: Exchanges) -> Exchanges:
        return tuple(
            tuple(replace(b, bytes=self.bytes(a.bytes, b.bytes)) for a, b in zip(*layers, strict=True))
            for layers in zip(one, whole, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Grouped:
    """Micro-batches of so many samples, of which so many at most can be grouped (k of kFkB)."""

    size: int
    group_size: int


def undominated(points: Iterable[Grouped]) -> list[Grouped]:
    """Returns those for which there is no other with as many samples and as large groups, the most samples first."""
    found: list[Grouped] = []
    for point in sorted(points, key=lambda one: (-one.size, -one.group_size)):
        if not found or point.group_size > found[-1].group_size:
            found.append(point)
    return found


def memory_curve(whole: TrainingJob, strategy: Strategy) -> list[int]:
    """Returns the sizes of micro-batches that are worth a try with the cut of a strategy, the largest first.

    Ada-Grouper's candidates: of each size the largest groups that fit into memory; a size is of no use where a larger
    one can be grouped as much. With several segments there is no kFkB, and all that fit are.

    Args:
        whole: the job, of micro-batches that are not divided, some samples of which are known.
    """
    points = []
    for size in sizes_of(whole.samples or 1):
        job = registry.with_costs(in_parts(whole, size), strategy.settings)
        plan = replace(Plan.of(strategy), schedule="1f1b" if strategy.segments == 1 else strategy.schedule)
        if strategy.segments > 1:
            points.append(Grouped(size, job.micro_batches if _fits(job, plan) else 0))
            continue
        fit, no = 0, job.micro_batches + 1  # the most that fit lie between
        while no - fit > 1:
            middle = (fit + no) // 2
            fits = _fits(job, replace(plan, schedule="kfkb", group_size=middle))
            fit, no = (middle, no) if fits else (fit, middle)
        points.append(Grouped(size, fit))
    return [one.size for one in undominated(one for one in points if one.group_size)]


def _fits(job: TrainingJob, plan: Plan) -> bool:
    if job.memory_limit is None:
        return True
    return max(curve.peak.device for curve in simulate(job, plan)[1]) <= job.memory_limit


_WORTH_PARTS = 0.97
"""Smaller micro-batches are taken if a step takes at most so much of one with larger ones."""
_HOPELESS = 1.5
"""Times the shortest step: smaller ones still are not looked at, each of which takes the planner longer."""
_APART = 1.5
"""Sizes that are nearer to each other are not told apart."""


@dataclass(frozen=True, slots=True)
class Sized:
    """What the planner proposes for micro-batches of so many samples."""

    size: int
    job: TrainingJob
    proposal: Proposal

    @property
    def fits(self) -> bool:
        """Whether that keeps to the limits."""
        limit, pool = self.job.memory_limit, self.job.pool_limit
        within = limit is None or self.proposal.memory_bytes <= limit
        return within and (pool is None or max(peak.pool for peak in self.proposal.peaks) <= pool)


def sizes_of(samples: int, most: int | None = None) -> list[int]:
    """Returns the numbers of samples to try, the largest first: divisors of `samples` that are apart.

    Args:
        most: largest one; None: `samples`.
    """
    found: list[int] = []
    for size in range(min(samples, most or samples), 0, -1):
        if samples % size == 0 and (not found or size * _APART <= found[-1]):
            found.append(size)
    return found if found[-1] == 1 else [*found, 1]


def search_sizes(sizes: Iterable[int], plan: Callable[[int], tuple[TrainingJob, Proposal]]) -> list[Sized]:
    """Returns what was tried, the chosen size first: the largest with about the shortest step of those that fit; where
    none does, the one that needs least.

    Args:
        sizes: the largest first.
        plan: returns what the planner was told of a size, and says of it. Raises ConfigError where it cannot be.
    Raises: ConfigError, the first one, where no size can be.
    """
    found: list[Sized] = []
    refused: ConfigError | None = None
    best = None
    for size in sizes:
        try:
            found.append(Sized(size, *plan(size)))
        except ConfigError as error:
            refused = refused or error
            continue
        if found[-1].fits:
            step_ms = found[-1].proposal.step_ms
            best = step_ms if best is None else min(best, step_ms)
            if step_ms > _HOPELESS * best:
                break
    if not found:
        raise refused or ConfigError("there is no size of micro-batches to try")
    if best is None:
        return sorted(found, key=lambda one: (one.proposal.memory_bytes, one.proposal.step_ms))
    least = best / _WORTH_PARTS
    chosen = max((one for one in found if one.fits and one.proposal.step_ms <= least), key=lambda one: one.size)
    others = [one for one in found if one is not chosen]
    return [chosen, *sorted(others, key=lambda one: (not one.fits, one.proposal.step_ms))]


def remark_on(found: list[Sized], samples: int, *, measured: bool) -> str:
    """Returns what was traded, in words.

    Args:
        found: from `search_sizes`.
        samples: of an undivided micro-batch.
        measured: whether the time of a part was measured.
    """
    chosen = found[0]
    said = f"micro_batch_size={chosen.size} of {samples} samples"
    said += ", whole micro-batches" if chosen.size == samples else f", {samples // chosen.size} parts"
    others = "; ".join(
        f"{one.size}: {_costs(one)}" + ("" if one.fits else ", does not fit")
        for one in sorted(found, key=lambda one: -one.size)
        if one is not chosen
    )
    how = "" if measured or not others else "; times are in proportion to samples, a part was not measured"
    return f"{said}: {_costs(chosen)}" + (f"; {others}" if others else "") + how


def _costs(one: Sized) -> str:
    spared = str(Spared.of(one.proposal.strategy.settings))
    needs = f"{one.proposal.step_ms:.1f} ms a step and {text_of_bytes(one.proposal.memory_bytes)}"
    return needs + (f" with {spared}" if spared else "")
