"""Ladder, climb(), lighten(): what makes a plan fit with as little recomputation and as few copies as that takes.

That is stage-aware (Merak, section 5.2): earlier stages keep more micro-batches, so they compute more again. Of a
stage the first chunks come first, whose activations are kept longest; where the others' leave the device, all chunks
compute a little again. And of the micro-batches a share may leave, the least that it takes: so copies that are too slow
for all of them hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fold3d.offload import Offload
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.memory.model import StagePeak
from fold3d.plan.memory.spared import Spared
from fold3d.plan.space import offload, recompute
from fold3d.plan.space.candidates import spared_from
from fold3d.recompute import Choice, Recompute
from fold3d.topology import chunks_of, num_segments

_NONE = Choice()
_STEPS: dict[str, tuple[Choice, ...]] = {
    "full": (Choice(full=True),),
    "blocks": (Choice(every=4), Choice(every=2), Choice(every=1)),
}
"""What a chunk recomputes, from little to all of it."""

_SHARES = (100, 50, 25)
"""Percent of the micro-batches whose stashes leave, where chunks compute again besides."""
_FINEST = 16
"""Shares are looked at in so many steps, at most."""

Try = Callable[[Spared], tuple[int, Sequence[StagePeak]]]
"""Returns the nanoseconds of a step of a plan that spares so, and the peaks of its stages."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Ways of sparing memory, each rung of which takes more time than the one below it, for each stage by itself."""

    chunks: int
    pp: int
    style: str
    """On which stages the chunks live."""
    steps: tuple[Choice, ...]
    """Of a chunk; none: what is recomputed is fixed."""
    spared: Spared
    """What `offload` is, and the fixed recomputation."""

    @property
    def top(self) -> int:
        """The number of the highest rung, from 0."""
        return len(self.steps) * num_segments(self.chunks, self.pp)

    def at(self, rungs: Sequence[int]) -> Spared:
        """Returns what stands on a rung of each stage."""
        if not self.steps:
            return self.spared
        choices = [_NONE] * self.chunks
        for stage, rung in enumerate(rungs):
            mine = chunks_of(stage, self.chunks, self.pp, self.style)
            for place, chunk in enumerate(mine):
                if self.spared.offload.nothing:
                    step = min(rung - len(self.steps) * place, len(self.steps))
                else:  # copies are best spread over the step
                    step = (rung - place - 1) // len(mine) + 1
                if step > 0:
                    choices[chunk] = self.steps[step - 1]
        alike = len(set(choices)) == 1
        return replace(self.spared, recompute=Recompute((choices[0],) if alike else tuple(choices)))


def ladders(job: Job, constraints: Constraints, chunks: int) -> Iterator[Ladder]:
    """Yields what is to be tried with so many chunks, as far as `constraints` leave it open."""
    fixed = spared_from(constraints)
    again_is_free = recompute.KNOB.fixed(constraints) is None
    leaves = [fixed.offload]
    if offload.KNOB.fixed(constraints) is not None:
        if not again_is_free:
            return
    elif job.pool_is_elsewhere:
        leaves = [Offload(), Offload("boundaries"), *(Offload("activations", share) for share in _SHARES)]
    for how in leaves:
        spared = replace(fixed, offload=how)
        is_share = how != fixed.offload and how.percent < 100  # of what leaves alone `lighten` finds the best one
        if not is_share and spared.offloaded(chunks):
            yield Ladder(chunks, job.pp, job.style, (), spared)
        for name, steps in _STEPS.items() if again_is_free else ():
            if chunks == 1 and name == "full":  # one chunk in one piece recomputes block by block
                continue
            if not is_share or name == "blocks":
                yield Ladder(chunks, job.pp, job.style, steps, spared)


def lighten(job: Job, spared: Spared, tried: Try, fits: Callable[[StagePeak], bool]) -> None:
    """Looks for the least share of micro-batches whose stashes must leave so that every stage fits, where those of all
    would do; what it looks at, `tried` notes.

    Args:
        spared: with `offload` of all micro-batches.
    """
    steps = min(job.micro_batches, _FINEST)

    def has_room(step: int) -> bool:
        percent = -(-100 * step // steps)
        return all(map(fits, tried(replace(spared, offload=replace(spared.offload, percent=percent)))[1]))

    low, high = 0, steps
    if not has_room(high):
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_room(middle) else (middle, high)


def climb(ladder: Ladder, tried: Try, fits: Callable[[StagePeak], bool], least_ns: int) -> None:
    """Looks for the lowest rungs with which every stage fits, and, where copies make a step longer, for higher ones
    with fewer copies that make it shorter; what it looks at, `tried` notes.

    Args:
        least_ns: of a step of the plan that spares nothing.
    """
    enough, failed = [ladder.top] * ladder.pp, [-1] * ladder.pp
    if not all(map(fits, tried(ladder.at(enough))[1])):
        return
    # Stages hardly depend on each other: all of them are halved at once.
    while any(high - low > 1 for low, high in zip(failed, enough, strict=True)):
        middle = [(low + high) // 2 if high - low > 1 else high for low, high in zip(failed, enough, strict=True)]
        for stage, peak in enumerate(tried(ladder.at(middle))[1]):
            (enough if fits(peak) else failed)[stage] = middle[stage]
    for _ in range(ladder.top):
        good = [fits(peak) for peak in tried(ladder.at(enough))[1]]
        if all(good):
            break
        enough = [min(rung + (not ok), ladder.top) for rung, ok in zip(enough, good, strict=True)]
    if ladder.spared.offload.nothing or not ladder.steps:
        return

    def step_ns(rung: int) -> int:
        return tried(ladder.at([max(rung, low) for low in enough]))[0]

    rung, width = 0, ladder.top
    while width > 1 and step_ns(rung) > least_ns:
        width = (width + 1) // 2
        near = [rung, *(other for other in (rung - width, rung + width) if 0 <= other <= ladder.top)]
        rung = min(near, key=step_ns)
