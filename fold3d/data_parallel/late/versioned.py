"""Versioned, DP.sync of weights that have versions; Predicted, where gradients are those of weights to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.data_parallel.gradient_states import State
from fold3d.data_parallel.late.weight_versions import WeightVersions


class Versioned(DpSync):
    """Updates make new versions of weights in the memory of the oldest; between steps parameters have the newest."""

    keeps_versions = False
    """Whether the versions before the newest are part of what a state has: they do not follow from it."""
    _mark = ""
    """In the names that they have there."""

    def __init__(self, *args: Any, versions: int = 2, **named: Any) -> None:
        """Args: as DpSync's, and how many `versions` there are."""
        super().__init__(*args, **named)
        self._count = versions
        self._versions: WeightVersions | None = None
        self._are_alike = True  # no version but the newest counts any more

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """See `DpSync.attach`; weights have their versions from now on."""
        self._versions = WeightVersions(self.buckets, self._count, mark=self._mark)
        super().attach(optimizer, parts=parts)

    @property
    def versions(self) -> WeightVersions | None:
        """The versions; None without an optimizer. Those before the newest may be out of date before `begin`."""
        if self._versions is not None and self._are_alike:
            self._versions.forget()
            self._are_alike = False
        return self._versions

    def forget_versions(self) -> None:
        """The weights of now, or those that are about to be loaded, are all there is."""
        self._are_alike = True

    def _make_room(self, *, is_updated: bool = True) -> None:
        """The oldest version is the newest from now on; the next update fills it, or, without one, it is the same."""
        versions, optimizer = self._versions, self._optimizer
        assert versions is not None and optimizer is not None
        super().flush()
        versions.turn()
        for number, bucket in enumerate(self.buckets):
            optimizer.point(bucket)
            if not is_updated or self._plan.modes[number] == "zero1":
                versions.fill(bucket)

    def _open(self, bucket: Bucket) -> None:
        if self._optimizer is not None and self._optimizer.is_postponed(bucket):
            assert self._versions is not None
            self._versions.fill(bucket)
        super()._open(bucket)

    def flush(self) -> None:
        """See `DpSync.flush`: parameters have the newest weights until an action needs others."""
        super().flush()
        if self._versions is not None:
            self._versions.point(self._versions.newest)


class Predicted(Versioned):
    """With late gradients: a step computes them on W(t) + (W(t) - W(t-1)), which is W(t+1) if updates are alike.

    There they are taken. What evaluations, callbacks and checkpoints see is W(t), and what others write there counts.
    """

    keeps_versions = True
    _mark = "update"  # what is kept is what the last update added, and no weights, as with PipeDream's versions

    def __init__(self, *args: Any) -> None:
        """Args: as DpSync's, with late gradients."""
        super().__init__(*args)
        self._updated: set[int] = set()  # buckets whose version before is still the weights before their last update
        self._unpredicted: set[int] = set()  # where it is what that update has added

    def begin(self, micro_batches: int, chunks: Sequence[int], *, whole: bool = False) -> None:
        """See `DpSync.begin`; parameters have the predicted weights until `end`."""
        super().begin(micro_batches, chunks, whole=whole)
        versions = self.versions
        assert versions is not None
        for bucket in self.buckets:
            self._predict(bucket)
        versions.point(versions.older(1))

    def end(self) -> None:
        """See `DpSync.end`. What the last update has added is there again: this step may be dropped, and weights be
        written before the next one."""
        super().end()
        assert self._versions is not None
        self._versions.point(self._versions.newest)
        for bucket in self.buckets:
            if bucket.number not in self._unpredicted | self._updated:
                self._versions.take_back(bucket)
                self._unpredicted.add(bucket.number)

    def update(self, *, keeps: bool = True) -> None:
        """See `DpSync.update`."""
        assert self._late is not None and self._optimizer is not None
        if self._states.has_gradients and self._late.settings is not None:
            self._optimizer.check_unchanged()
            self._make_room()
            self._updated = {bucket.number for bucket in self.buckets}
            self._unpredicted.clear()
        elif self._states.has_gradients:
            self.forget_versions()
        super().update(keeps=keeps)

    @property
    def versions(self) -> WeightVersions | None:
        """See `Versioned.versions`. Of the version before there is what the last update has added."""
        if self._versions is not None and self._are_alike:
            for bucket in self.buckets:
                self._versions.vanish(bucket)
                self._unpredicted.add(bucket.number)
            self._are_alike = False
        return self._versions

    def _open(self, bucket: Bucket) -> None:
        super()._open(bucket)
        assert self._versions is not None
        if bucket.number in self._updated:
            self._versions.subtract(bucket)
            self._updated.discard(bucket.number)
            self._unpredicted.add(bucket.number)
        if self._states.state is State.ACCUMULATING:
            self._predict(bucket)

    def _predict(self, bucket: Bucket) -> None:
        """For a step under way; one that is not up to date comes later."""
        if bucket.number in self._unpredicted:
            assert self._versions is not None
            self._versions.predict(bucket)
            self._unpredicted.discard(bucket.number)

    def flush(self) -> None:
        """See `Versioned.flush`; in the middle of a step parameters keep the weights that it computes on."""
        if self._states.state is State.ACCUMULATING:
            self._readiness.open_all()
        else:
            super().flush()
