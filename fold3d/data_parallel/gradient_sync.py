"""GradientSync: what becomes of a step's gradients after the backwards, whatever the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fold3d.data_parallel.gradients import Factor
from fold3d.data_parallel.optimizer.bucketwise_optimizer import BucketwiseOptimizer
from fold3d.observe.step_breakdown import RawRecord


class GradientSync:
    """Of one rank: `DpSync`, or `OneReplica` where there are no replicas to sum over. What does nothing here is right
    where the gradients are this rank's alone.

    The order of a step: `begin`; while actions run `before_chunk` and `chunk_done`; `end`; `norm`, `scale`; then the
    optimizer, or `abandon`. All ranks make the same calls.
    """

    steps_by_itself = False
    """Whether `update` steps the optimizer, whose own step then finds no gradients."""

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """The gradients are this optimizer's; `parts`: whether any stage steps parts of parameters.

        Raises: ConfigError when it cannot be stepped stage by stage, or part by part.
        """

    def begin(self, micro_batches: int, chunks: Sequence[int], *, whole: bool) -> None:
        """A step begins.

        Args:
            chunks: of this rank, in the order of their last backwards.
            whole: somebody reads or changes `.grad` before the optimizer's step, which takes what it finds.
        """

    def check_taken(self) -> None:
        """Raises ConfigError where gradients of the step before are still here, for an optimizer that was attached."""

    def before_chunk(self, chunk: int) -> None:
        """Waits for the parameters that any module of the chunk may read."""

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done."""

    def end(self) -> None:
        """All backwards are done."""

    def norm(self) -> Tensor:
        """Returns the exact global gradient norm, scalar on the rank's device, the same on every rank."""
        raise NotImplementedError

    def scale(self, coefficient: Factor) -> None:
        """Scales the step's gradients, now or when the optimizer takes them."""

    def update(self) -> None:
        """Begins the optimizer's step; where `steps_by_itself`."""

    def updated(self) -> None:
        """The optimizer's own step is over; where `steps_by_itself`."""

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be taken."""

    def flush(self) -> None:
        """Brings all parameters of this rank up to date; meets nobody."""

    def finish(self) -> None:
        """Waits for what is under way."""

    def collect_state(self) -> None:
        """Makes the optimizer's state whole on this rank; all replicas call."""

    @property
    def keeps_pieces(self) -> BucketwiseOptimizer | None:
        """Who keeps this replica's part of the optimizer's state of what the replicas step in parts; None: nobody."""
        return None

    def settle(self) -> None:
        """As `flush`, and nothing that was begun is under way any more."""

    def before_state_dict(self) -> None:
        """The optimizer's state is about to be read. Raises ConfigError when it is not whole."""

    def split_state(self) -> None:
        """The whole state is in the optimizer: it was loaded, or collected and perhaps changed."""

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Attributes of the attached optimizer were set between two steps."""

    def take_records(self) -> list[RawRecord]:
        """Returns transfers and waits since the last call."""
        return []

    def abort(self, reason: str) -> None:
        """Ends all communication; any thread."""

    def close(self) -> None:
        """Ends what it began and takes its hooks off the model."""
