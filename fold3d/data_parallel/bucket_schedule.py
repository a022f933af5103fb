"""BucketSchedule: how each bucket of a rank is synchronised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fold3d.placement.bucket_layout import BucketSpec
from fold3d.plan.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSchedule:
    """The buckets of one stage in the order of the forward pass, the same on all its replicas."""

    buckets: tuple[BucketSpec, ...]
    modes: tuple[str, ...]
    """Per bucket "zero1" or "early"."""
    gather_order: tuple[int, ...]
    """Early buckets in the order in which their gradients are gathered, each once it is reduced. Tied buckets are not
    among them: their sum ends with the vote."""
    serial: bool
    """No DP.sync before the pipeline is done, none after the step: the baseline that hides nothing."""

    @classmethod
    def make(cls, buckets: Sequence[BucketSpec], strategy: Strategy, stage: int) -> BucketSchedule:
        """Returns what the strategy says of a stage's buckets."""
        planned = 1 + max((bucket.planned for bucket in buckets), default=-1)
        return cls.of(buckets, strategy.modes_of(stage, planned), strategy.gathers_of(stage, planned))

    @classmethod
    def of(cls, buckets: Sequence[BucketSpec], modes: Sequence[str], gather_order: Sequence[int]) -> BucketSchedule:
        """Returns the plan of one stage.

        Args:
            modes: per planned bucket "zero1", "early" or "serial" (all or none).
            gather_order: planned early buckets.
        """
        plan = cls(
            buckets=tuple(buckets),
            modes=tuple("zero1" if modes[bucket.planned] == "zero1" else "early" for bucket in buckets),
            gather_order=(),
            serial="serial" in modes,
        )
        return plan.in_order(gather_order)

    def in_order(self, gather_order: Sequence[int]) -> BucketSchedule:
        """Returns the same with another order of gathers, of planned early buckets."""
        numbers: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            if not bucket.summed_over.is_shared:
                numbers.setdefault(bucket.planned, []).append(number)
        return replace(
            self, gather_order=tuple(number for planned in gather_order for number in numbers.get(planned, ()))
        )
