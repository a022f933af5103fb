"""WithoutFlush: DP.sync of steps that follow each other without a flush (PipeDream-2BW, Narayanan et al. 2021, 3.1).

A step's list on a rank (`_C.without_flush`) has all forwards of step t and, left of step t-1, its last backwards:

    begin_slice      gradients of step t-1 go on being added up
    forwards of t    on W(t), which each layer is stepped to before its first one; backwards of t-1 on W(t-1)
    chunk_done       the last backward of t-1 is over: its sums, then its norm, are sent beside what follows; backwards
                     of step t, on W(t), add to the other set of gradients
    end_slice        waits for the norm of t-1, and for the loss
    update           W(t+1) = W(t) - update(g(W(t-1))), as with a flush (`LateGradients`), in the memory of W(t-1)

After the drain, and in steps with a flush, everything is as in `DpSync`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fold3d import _C
from fold3d.comms.groups import Groups
from fold3d.config import ParallelConfig
from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.gradient_states import Event, State
from fold3d.data_parallel.late.exchange import Exchange
from fold3d.data_parallel.late.versioned import Versioned
from fold3d.data_parallel.tied_buckets import TiedBuckets
from fold3d.data_parallel.transfers import NoReplicas
from fold3d.errors import ConfigError
from fold3d.stage.rank_model import RankModel

Told = tuple[list[int], Tensor, Tensor]
"""Counts, the norm, and what `end_slice` was given, summed over the replica."""


class WithoutFlush(Versioned):
    """Of one rank with one chunk; all ranks make the same calls. See `DpSync` for what is not here."""

    def __init__(
        self,
        cut: RankModel,
        groups: Groups,
        config: ParallelConfig,
        rings: _C.BucketSync | NoReplicas,
        *rest: Any,
    ) -> None:
        """All ranks of the job call. Args: as DpSync takes them; with late gradients."""
        super().__init__(cut, groups, config, rings, *rest)
        assert self._late is not None
        self._sync = rings
        self._exchange = Exchange[Told](groups.topology, config.timeout_seconds, groups.world.progress.life)
        self._flowing = False  # micro-batches of the step before are in the pipeline
        self._in_slice = False
        self._micro_batches = 0
        self._chunks: Sequence[int] = ()
        self._before = 0  # version of the step before
        self._taken: dict[int, int] = {}  # key of the gradients that a bucket is stepped with
        self._values: Tensor | None = None  # of the step whose last backwards are to come
        self._told: Told | None = None
        # Each set of gradients by itself, for the thread that waits for its sums while the other one is added to.
        self._sets: list[list[Bucket]] = []
        for _ in range(2):
            self._sets.append([copy.copy(bucket) for bucket in self.buckets])
            self._late.turn()
        self._ties = [TiedBuckets(one, groups.ties, groups.topology, self._exchange.progress) for one in self._sets]

    # A step

    def begin_slice(self, micro_batches: int, chunks: Sequence[int]) -> None:
        """A step begins, in which the step before ends if it is not over.

        Args:
            micro_batches: of the step; those of the step before, if that is not over.
        """
        if self._optimizer is None:
            raise ConfigError(
                "flush=False needs an optimizer that Engine.attach was given; attach one, or set flush=True"
            )
        if self._states.allows(Event.DROP):
            raise ConfigError(
                "with flush=False each run is followed by optimizer.step(): backwards of this step may still be to "
                "come, so it cannot be left out; set flush=True"
            )
        self.check_trainable()
        self._buffers.begin()
        self._states.on(Event.BEGIN)
        self._norm, self._coefficient, self._shown = None, 1.0, []
        self._early, self._whole, self._in_slice = (), False, True
        self._micro_batches, self._chunks = micro_batches, chunks
        self._go_on()

    def begin_drain(self) -> None:
        """What is left of the step before is about to run. Raises: ConfigError where that step is not over."""
        if self._states.allows(Event.DROP):
            raise ConfigError(
                "with flush=False each run is followed by optimizer.step(), before evaluations, checkpoints and all "
                "else that ends what is in the pipeline: do that behind the step (on_step_end), or set flush=True"
            )
        self._in_slice = False
        self._go_on()

    def _go_on(self) -> None:
        assert self._late is not None and self._versions is not None
        self._versions.begin(self._versions.newest if self._in_slice else None)
        if self._flowing:
            self._late.turn()
            self._attach()
        else:
            self._add_up()

    def _add_up(self) -> None:
        """Gradients of the next step may come."""
        self._transfers.begin(())
        self._reducer.begin(self._micro_batches, self._chunks, hold=False)
        self._attach()

    def _attach(self) -> None:
        for bucket in self.buckets:
            bucket.attach()

    def turn_to(self, number: int, step_before: bool) -> None:
        """The next action is of this step, or of the step before: parameters have its weights."""
        assert self._versions is not None
        self._versions.turn_to(self._before if step_before else self._versions.newest)

    def chunk_done(self, chunk: int) -> None:
        """The step before is over: its gradients are summed, and its norm."""
        if not self._flowing:
            super().chunk_done(chunk)
            return
        late, step = self._late, self._transfers.step
        assert late is not None and self._values is not None and self._versions is not None
        self._versions.end()
        self._readiness.open_chunk(chunk)
        self._reducer.chunk_done(chunk)
        late.gather(self._plan.gather_order)
        self._exchange.begin(self._tell(step, self._values))
        late.turn()
        if self._in_slice:
            self._add_up()
        else:
            self._flowing = False

    def _tell(self, step: int, values: Tensor) -> Callable[[], Told]:
        """Returns what sums the gradients of a step, and tells of them, on the exchange's thread."""
        number = next(k for k, one in enumerate(self._sets) if one[0].key == self.buckets[0].key) if self.buckets else 0
        buckets, ties, world = self._sets[number], self._ties[number], self._exchange.world
        for face, bucket in zip(buckets, self.buckets, strict=True):
            face.set_used(bucket.used)
        counts = self._counts(buckets)

        def tell() -> Told:
            for bucket in buckets:
                self._sync.wait_reduced(bucket.key, step)
            ties.sum()
            world.all_reduce_replica(values)
            return (*self._measure(buckets, counts, world), values)

        return tell

    def end_slice(self, values: Tensor) -> Tensor | None:
        """The step's forwards are over.

        Args:
            values: fp64, which are summed over the replica once the step's backwards are over, too.
        Returns: the sums of the step before; None where it was over.
        """
        self._states.on(Event.HAND_OVER)
        self._values = values
        assert self._late is not None and self._versions is not None
        self._versions.end()
        for bucket in self.buckets:
            bucket.veil(taken=False)
        self._late.turn()  # what norm and update are of from here on
        self._flowing = True
        return self._told_of_step()

    def end_drain(self) -> Tensor:
        """What was left of the step before is over. Returns the sums of its `values`."""
        for bucket in self.buckets:
            bucket.veil(taken=True)
        told = self._told_of_step()
        assert told is not None and self._late is not None
        self._told = None  # the norm is asked for when an update takes the gradients
        self._late.is_summed()
        self.flush()
        return told

    def _told_of_step(self) -> Tensor | None:
        self._told = None
        if self._exchange.begun:
            self._told = self._exchange.wait()
        return None if self._told is None else self._told[2]

    def _sum_norm(self) -> Tensor:
        if self._told is None:
            return super()._sum_norm()
        self._states.on(Event.MEASURE)
        (counts, norm, _), self._told = self._told, None
        return self._agree(counts, norm)

    def update(self, *, keeps: bool = True) -> None:
        """See `DpSync.update`; the weights before the newest ones make room for new ones."""
        versions, late, optimizer = self._versions, self._late, self._optimizer
        assert versions is not None and late is not None and optimizer is not None
        if not self._states.has_gradients:
            return
        optimizer.check_unchanged()
        self._before = versions.newest
        is_updated = late.settings is not None
        if is_updated or self._flowing:  # what may be written from outside is not what graphs under way read
            self._make_room(is_updated=is_updated)
            self._taken = {bucket.number: bucket.key for bucket in self.buckets} if is_updated else {}
        versions.point(versions.newest)
        super().update(keeps=keeps)
        versions.note_writes()

    def _open(self, bucket: Bucket) -> None:
        with self._turned_to_taken(bucket):
            self._transfers.wait_gathered(bucket)
            if self._optimizer is not None and self._optimizer.is_postponed(bucket):
                assert self._versions is not None
                self._versions.fill(bucket)
                self._optimizer.step_postponed(bucket)
                bucket.clear()
        if self._states.has_gradients:
            bucket.attach()

    @contextlib.contextmanager
    def _turned_to_taken(self, bucket: Bucket) -> Iterator[None]:
        other = self._taken.get(bucket.number, bucket.key) != bucket.key
        if other:
            bucket.turn()
        try:
            yield
        finally:
            if other:
                bucket.turn()

    def _is_stale(self, bucket: Bucket) -> bool:
        versions = self._versions
        return super()._is_stale(bucket) and (versions is None or versions.shown == versions.newest)

    # Between steps

    @property
    def is_flowing(self) -> bool:
        """Whether micro-batches of the last step are in the pipeline."""
        return self._flowing

    def abandon(self) -> None:
        """See `DpSync.abandon`. Raises: ConfigError where backwards of the step are to come."""
        if self._flowing and self._states.state is State.SUMMING:
            raise ConfigError("with flush=False a step cannot be left out; set flush=True")
        super().abandon()

    def close(self) -> None:
        """See `DpSync.close`."""
        super().close()
        self._exchange.close()
