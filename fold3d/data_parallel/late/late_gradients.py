"""LateGradients: gradients that an optimizer takes a step later, so that they are summed under a whole step.

With gradient_delay=1 the step t computes the gradients g of the weights W(t), and ends with

    W(t+1) = W(t) - update(g(W(t-1)))

The norm and the clipping are those of g(W(t-1)), the optimizer's settings those of the call that made it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.gradients import Factor
from fold3d.data_parallel.optimizer.bucket_optimizer import Settings
from fold3d.data_parallel.tied_buckets import TiedBuckets
from fold3d.data_parallel.transfers import BucketTransfers


class LateGradients:
    """The gradients of the step before, of one rank; all replicas of its stage make the same calls.

    Buckets have two sets of gradients. One takes up those of a step, and is the bucket's own from the optimizer's step
    until the backwards are over; then they turn, and the other one is, which had this step to be summed.

    Attributes:
        settings: of the optimizer, when it was called in the step that made the gradients; None: there are none.
        gathered: numbers of the buckets whose gradients each replica has, or will have, without further ado.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transfers: BucketTransfers,
        tied: TiedBuckets,
        settle: Callable[[], None],
        share_use: Callable[[], None],
    ) -> None:
        """Args:
        settle: brings weights up to date, and ends what is under way.
        share_use: tells the buckets of parameters that were used elsewhere; all replicas call.
        """
        self._buckets, self._transfers, self._tied = buckets, transfers, tied
        self._settle, self._share_use = settle, share_use
        self.settings: Settings | None = None
        self._step = 0
        self._is_summed = True
        self.gathered: set[int] = set()

    def turn(self) -> None:
        """The other set of gradients is the buckets' own."""
        for bucket in self._buckets:
            bucket.turn()

    def sum(self) -> None:
        """Waits for the sums over the replicas, and adds up those of weights that several ranks hold; their own set."""
        if not self._is_summed:
            self._transfers.wait_reduced(self._step)
            self._tied.sum()
            self._is_summed = True

    def gather(self, gathers: Sequence[int]) -> None:
        """Gathers these buckets once they are summed, behind all gathers so far; their own set, which comes next."""
        self.gathered = set(gathers)
        for number in gathers:
            self._transfers.gather_gradients(self._buckets[number])

    def is_summed(self) -> None:
        """The sums are here: somebody has waited for them."""
        self._is_summed = True

    def taken_with(self, coefficient: Factor) -> Settings | None:
        """Returns the settings that the optimizer takes the gradients with; None where there are none."""
        return None if self.settings is None else replace(self.settings, coefficient=coefficient)

    def keep(self, settings: Settings | None, gathers: Sequence[int]) -> None:
        """The gradients of this step, which are in the other set, are those that come next; None: it has made none.

        Args:
            gathers: buckets whose gradients are gathered once they are summed, behind all gathers so far.
        """
        self.settings, self._step, self._is_summed = settings, self._transfers.step, settings is None
        self.gathered = set(gathers)
        if settings is not None:
            with self._turned():
                self.gather(gathers)

    def whole(self) -> dict[str, Tensor]:
        """Returns the mean gradients by name, of what is used, as they are; between steps, and it changes no bit.

        All replicas of the stage call, and all ranks that hold the same weights.
        """
        if self.settings is None:
            return {}
        self._settle()
        with self._turned():
            self.sum()
            self._share_use()
            for bucket in self._buckets:
                if bucket.number not in self.gathered:
                    self._transfers.gather_gradients(bucket)
                self.gathered.add(bucket.number)
            for bucket in self._buckets:
                self._transfers.wait_gathered(bucket)
            found = [triple for b in self._buckets for triple in zip(b.names, b.views, b.used, strict=True)]
            return {name: view for name, view, used in found if used}

    def load(self, settings: Settings | None, fill: Callable[[str, Tensor], bool]) -> None:
        """Puts others in their place, between steps; all replicas of the stage call.

        Args:
            settings: None: there are none any more.
            fill: of a parameter's name and its gradient, which it fills; returns whether it has one.
        """
        self._settle()
        self.settings, self._is_summed = settings, True
        self.gathered = {bucket.number for bucket in self._buckets}
        with self._turned():
            for bucket in self._buckets:
                bucket.clear()
                if settings is not None:
                    bucket.set_used([fill(*both) for both in zip(bucket.names, bucket.views, strict=True)])

    @contextlib.contextmanager
    def _turned(self) -> Iterator[None]:
        self.turn()
        try:
            yield
        finally:
            self.turn()
