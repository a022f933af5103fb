"""WeightVersions: several versions of a rank's weights, for gradients that are taken after other updates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fold3d.data_parallel.bucket import Bucket
from fold3d.torch_private import set_version_counts

_VERSION = re.compile(r"@[a-z]*\d+$")


def parameter_of(name: str) -> str:
    """Returns the parameter's name of one that `WeightVersions.by_name` returns; a parameter's own name as it is."""
    return _VERSION.sub("", name)


class WeightVersions:
    """The newest weights of some buckets, and those before them: flat tensors of each bucket that take turns.

    A graph keeps a parameter as the parameter, and finds the memory that it has when its backward runs, so parameters
    must have the memory of an action's version in its forward and in its backward (`point`). Updates go to the flat
    tensors, never through the parameters, whose graphs would find them changed.

    What others do to the parameters between two steps is of the newest version, and nothing that graphs whose backwards
    are to come may find: neither in-place writes nor `requires_grad`. Each has that as it was in its forward.
    """

    def __init__(self, buckets: Sequence[Bucket], count: int = 2, *, mark: str = "") -> None:
        """Moves the parameters of the buckets into flat tensors; all versions are alike at first.

        Args:
            mark: in their names, of what the versions before the newest are where they are no weights.
        """
        self._buckets, self.count, self._mark = buckets, count, mark
        self._newest, self._shown = 0, 0
        self._parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self._writes: dict[Tensor, int] = {}
        self._trained: dict[int | None, list[bool]] = {}
        """By version: whether each parameter is trained, as the graphs on it have it; None: as others have it now."""
        self._acts_on: int | None = None  # the version whose entry of `_trained` the parameters have
        self._flats: list[list[Tensor]] = []
        self._views: list[list[list[Tensor]]] = []  # [bucket][version][parameter]
        for bucket in buckets:
            flats = bucket.add_versions(count)
            self._flats.append(flats)
            self._views.append([bucket.views_of(flat) for flat in flats])

    @property
    def newest(self) -> int:
        """Number of the newest version."""
        return self._newest

    def older(self, updates: int) -> int:
        """Returns the number of the version that was the newest so many updates ago, at most count - 1."""
        return (self._newest - updates) % self.count

    def turn(self) -> None:
        """The oldest version is the newest from now on, and gets its values by `fill`."""
        self._newest = self.older(-1)
        for bucket in self._buckets:
            bucket.use_version(self._newest)

    def fill(self, bucket: Bucket) -> None:
        """Begins the bucket's newest version with the values of the one before, for an update of them."""
        if self.count > 1:
            flats = self._flats[bucket.number]
            flats[self._newest].copy_(flats[self.older(1)])

    def subtract(self, bucket: Bucket) -> None:
        """Puts what the last update has added in the place of the version before: W(t) - W(t-1)."""
        flats = self._flats[bucket.number]
        flats[self.older(1)].neg_().add_(flats[self._newest])

    def predict(self, bucket: Bucket) -> None:
        """Puts what the next update would make of the newest weights, if it was like the last one, in the place of what
        `subtract` has put there."""
        flats = self._flats[bucket.number]
        flats[self.older(1)].add_(flats[self._newest])

    def take_back(self, bucket: Bucket) -> None:
        """Puts what `subtract` has put there in the place of what `predict` has made of it."""
        flats = self._flats[bucket.number]
        flats[self.older(1)].sub_(flats[self._newest])

    def vanish(self, bucket: Bucket) -> None:
        """Puts what an update would add that changes nothing in the place of the version before."""
        self._flats[bucket.number][self.older(1)].zero_()

    def forget(self) -> None:
        """All versions are as the newest."""
        for flats in self._flats:
            for flat in flats:
                if flat is not flats[self._newest]:
                    flat.copy_(flats[self._newest])

    def by_name(self) -> dict[str, Tensor]:
        """Returns the versions before the newest, those of one update ago as "NAME@1", and so on; with a mark as
        "NAME@update1"."""
        return {
            f"{name}@{self._mark}{updates}": view
            for bucket, views in zip(self._buckets, self._views, strict=True)
            for updates in range(1, self.count)
            for name, view in zip(bucket.names, views[self.older(updates)], strict=True)
        }

    def load(self, fill: Callable[[str, Tensor], bool]) -> list[str]:
        """Fills all that `by_name` returns; returns what `fill`, of a name and its tensor, did not have."""
        return [name for name, view in self.by_name().items() if not fill(name, view)]

    def point(self, version: int) -> None:
        """Parameters have the memory of this version from now on."""
        if self._shown == version:
            return
        self._shown = version
        with torch._C.DisableTorchFunctionSubclass():  # those that wait for an update go on waiting
            for bucket, views in zip(self._buckets, self._views, strict=True):
                for parameter, view in zip(bucket.parameters, views[version], strict=True):
                    parameter.data = view

    def note_writes(self) -> None:
        """The newest version is another one than that of all graphs: it may be written from now on."""
        self._writes = {parameter: parameter._version for parameter in self._parameters}

    def begin(self, version: int | None = None) -> None:
        """Actions are to come; with forwards, if there is a `version`, which they take. See `turn_to` and `end`."""
        if self._writes:
            set_version_counts(self._writes)
        self._acts_on, self._trained[None] = None, [parameter.requires_grad for parameter in self._parameters]
        if version is not None:
            self._trained[version] = self._trained[None]

    def turn_to(self, version: int) -> None:
        """The actions that follow are of the graphs on this version."""
        self.point(version)
        self._train_as(version)

    def end(self) -> None:
        """No action is to come: parameters are trained as others have it."""
        self._train_as(None)

    def _train_as(self, version: int | None) -> None:
        before, now_on = self._trained[self._acts_on], self._trained[version]
        self._acts_on = version
        for parameter, was, now in zip(self._parameters, before, now_on, strict=True):
            if was != now:
                parameter.requires_grad_(now)

    @property
    def shown(self) -> int:
        """Number of the version that parameters have."""
        return self._shown
