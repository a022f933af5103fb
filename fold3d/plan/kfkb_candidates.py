"""Which k and which size of micro-batches kFkB may choose among: the points on the memory limit curve (Ada-Grouper)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Grouped:
    """An order of kFkB at a fixed batch."""

    k: int
    """Micro-batches of a group: `group_size` of the schedule kfkb."""
    b: int
    """Samples of a micro-batch."""


def kfkb_candidates(samples: int, fits: Callable[[Grouped], bool]) -> list[Grouped]:
    """Returns for every size of micro-batches the largest k that fits, without what is dominated (section 4.2).

    A larger k hides slower transfers, a larger b computes faster, and each takes memory. So whatever lies below another
    one that fits, in both, is never better. All candidates share one cut and one batch: going from one to another moves
    no weights and changes no number.

    Args:
        samples: of a step and replica; the sizes are what divides them.
        fits: whether a rank of every stage has the memory; of a smaller k it has, where it has of a larger one.
    Returns: k ascending, b descending; empty where not even one sample at a time fits.
    """
    found: list[Grouped] = []
    for b in range(samples, 0, -1):
        if samples % b:
            continue
        ks = range(1, samples // b + 1)
        k = bisect_left(ks, True, key=lambda k: not fits(Grouped(k, b)))  # so many fit
        if k > (found[-1].k if found else 0):
            found.append(Grouped(k, b))
    return found
