"""Pipeline: runs schedules on one rank, and gives every stage of the replica what comes out at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fold3d import _C
from fold3d.comms.consistency import check_same_batch, fingerprint
from fold3d.comms.groups import Groups
from fold3d.comms.tree_group import broadcast_value
from fold3d.device import library_rng_state
from fold3d.faults.progress import Progress
from fold3d.schedule import Schedule
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.offload import Keeps
from fold3d.topology import Topology


class Pipeline:
    """Of one rank; all stages of a replica make the same calls."""

    def __init__(
        self,
        topology: Topology,
        groups: Groups,
        executor: _C.Executor,
        progress: Progress,
        keep: Keeps = lambda micro_batches: None,
    ) -> None:
        """Args:
        keep: told of the micro-batches of a training step before it runs.
        """
        self._keep = keep
        self._topology, self._executor, self._progress = topology, executor, progress
        self._world = groups.world
        self._inputs = 0

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        *,
        backward: bool,
        goes_on: bool = False,
        is_left: bool = False,
        first: int = 0,
    ) -> list[Any]:
        """Runs this rank's actions; returns the results by micro-batch on the last stage, None of each elsewhere.

        Args:
            goes_on: with what the run before has left.
            is_left: the next run goes on with what is left of this one.
            first: number of the first of `micro_batches` in the schedule.
        """
        self._progress.begin(schedule)
        library_rng_state()  # whole, once: whoever has run before this may have set numpy's
        if not self._is_alone:  # as they were given: a loss function may write into them
            self._inputs = fingerprint([one.inputs for one in micro_batches])
        if self._topology.tp > 1:  # before they meet in a layer: there other shapes would not even be told apart
            with self._progress.during("comparing the micro-batches of shards", meets=True):
                ranks = self._topology.shards(self._topology.dp_rank, self._topology.pp_rank)
                found = self._fingerprints(micro_batches, ranks, self._world.tensor.all_reduce)
                check_same_batch(self._topology, ranks, found)
        if backward:
            self._keep(micro_batches)
        with self._progress.during(self._progress.doing):  # whom an action waits for follows from the schedule
            try:
                stage = self._topology.pp_rank
                numbered = [*[None] * first, *micro_batches]
                return self._executor.run(schedule, stage, backward, numbered, goes_on, is_left)[first:]
            except BaseException:
                for one in micro_batches:
                    with contextlib.suppress(Exception):  # the first error is the one to tell of
                        one.loss.let_go()
                raise

    def sum_of_losses(self, losses: Sequence[Any], micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Returns the sum of what `run` returned, scalar, on every rank of the replica, once all of them had the same
        micro-batches.

        Raises: ConfigError when they had not.
        """
        return _loss_of(self._meet(self._own_loss(losses, micro_batches), micro_batches))

    def _own_loss(self, losses: Sequence[Any], micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Returns the sum of the losses, and how many of them are fp64; zeros where other ranks have them."""
        # Summed in fp64: many small shares add up to one number that is compared over layouts.
        own = torch.zeros(2, dtype=torch.float64)
        if self.has_result:
            own[1] = sum(value.dtype == torch.float64 for value in losses)
            on_device = torch.stack([value.double().reshape(()) for value in losses])
            # Whoever waits for this rank should hear that it meets nobody yet.
            with self._progress.during(f"waiting for what its own device computes in {self._progress.doing}"):
                own[0] = micro_batches[0].loss.sum_of(on_device.cpu())
        return own

    def shares_of(self, losses: Sequence[Any], micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Returns this rank's summands, fp64, of what `loss_in` takes; meets nobody. `losses`: what `run` returned."""
        return self._shares(
            micro_batches, self._topology.replica(self._topology.dp_rank), self._own_loss(losses, micro_batches)
        )

    def loss_in(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the replica's loss of the sums over it of what `shares_of` returned on its ranks. Raises as
        `sum_of_losses`."""
        ranks = self._topology.replica(self._topology.dp_rank)
        check_same_batch(self._topology, ranks, [int(one) for one in sums[2:].tolist()])
        return _loss_of(sums)

    def sum_over_replica(self, values: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Returns the sums of `values`, fp64, on every rank of the replica. Raises as `sum_of_losses`."""
        return self._meet(values, micro_batches)

    @property
    def has_result(self) -> bool:
        """Whether what `run` returns on this rank counts: others have nothing, or the same."""
        return self._topology.has_loss and self._topology.tp_rank == 0

    def result_everywhere(self, result: Any, micro_batch: MicroBatch) -> Any:
        """Returns the last stage's `result`, any nesting of tensors and plain values, on every stage. Raises as
        `sum_of_losses`."""
        if self._is_alone:
            return result
        self._meet(torch.zeros((), dtype=torch.float64), [micro_batch])
        return broadcast_value(result, self._topology.loss_stage, self._world.pipeline)

    def _meet(self, value: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Returns the sum of `value`, fp64, over the replica, once all its ranks had the same micro-batches."""
        if self._is_alone:
            return value
        ranks = self._topology.replica(self._topology.dp_rank)
        found = self._fingerprints(micro_batches, ranks, self._world.all_reduce_replica, value)
        check_same_batch(self._topology, ranks, found)
        return value

    @property
    def _is_alone(self) -> bool:
        """Whether this rank is a replica by itself."""
        return self._topology.pp * self._topology.tp == 1

    def _fingerprints(
        self,
        micro_batches: Sequence[MicroBatch],
        ranks: Sequence[int],
        sum_up: Callable[[torch.Tensor], None],
        value: torch.Tensor | None = None,
    ) -> list[int]:
        """Returns those of the micro-batches of all `ranks`, who call.

        Args:
            sum_up: sums a tensor over them, in place; along trees, so that what lies one after the other grows with
                the logarithm of their number.
            value: fp64, of which all get the sum.
        """
        size = 0 if value is None else value.numel()
        shares = self._shares(micro_batches, ranks, value)
        sum_up(shares)
        if value is not None:
            value.copy_(shares[:size].reshape(value.shape))
        return [int(one) for one in shares[size:].tolist()]

    def _shares(
        self, micro_batches: Sequence[MicroBatch], ranks: Sequence[int], value: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns `value`, fp64, if there is one, and behind it a place for each of `ranks`: in this one's the
        fingerprint of its micro-batches, 0 in the others'."""
        size = 0 if value is None else value.numel()
        shares = torch.zeros(size + len(ranks), dtype=torch.float64)
        called = fingerprint([one.given for one in micro_batches if one.given])
        shares[size + ranks.index(self._topology.rank)] = (self._inputs + called) % 2**32
        if value is not None:
            shares[:size] = value.reshape(-1)
        return shares


def _loss_of(sums: torch.Tensor) -> torch.Tensor:
    """Returns the replica's loss, scalar, of the sums over it of what `_own_loss` returned: fp64 where the model's is,
    else in torch's default dtype."""
    return sums[0].to(torch.float64 if sums[1] > 0 else torch.get_default_dtype())
