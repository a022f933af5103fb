"""search_sizes(): how many samples pass the model at once, where their number in a step is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.plan.job import Job
from fold3d.plan.memory.spared import Spared
from fold3d.plan.proposal import Proposal

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
    job: Job
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


def search_sizes(sizes: Iterable[int], plan: Callable[[int], tuple[Job, Proposal]]) -> list[Sized]:
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
    others = "; ".join(_row(one) for one in sorted(found, key=lambda one: -one.size) if one is not chosen)
    how = "" if measured or not others else "; times are in proportion to samples, a part was not measured"
    return f"{said}: {_costs(chosen)}" + (f"; {others}" if others else "") + how


def _row(one: Sized) -> str:
    return f"{one.size}: {_costs(one)}" + ("" if one.fits else ", does not fit")


def _costs(one: Sized) -> str:
    spared = str(Spared.of(one.proposal.strategy.settings))
    needs = f"{one.proposal.step_ms:.1f} ms a step and {text_of_bytes(one.proposal.memory_bytes)}"
    return needs + (f" with {spared}" if spared else "")
