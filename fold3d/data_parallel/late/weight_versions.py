"""WeightVersions: two versions of a rank's weights, for steps that follow each other without a flush."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fold3d.data_parallel.bucket import Bucket


class WeightVersions:
    """The newest weights of some buckets, and those before them: two flat tensors per bucket that take turns.

    A graph keeps a parameter as the parameter, and finds the memory that it has when its backward runs, so parameters
    must have the memory of an action's version in its forward and in its backward (`point`). Updates go to the flat
    tensors, never through the parameters, whose graphs would find them changed.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """Moves the parameters of the buckets into flat tensors."""
        self._buckets = buckets
        self._newest, self._shown = 0, 0
        self._flats: list[list[Tensor]] = []
        self._views: list[list[list[Tensor]]] = []  # [bucket][version][parameter]
        for bucket in buckets:
            flats = bucket.add_version()
            self._flats.append(flats)
            self._views.append([bucket.views_of(flat) for flat in flats])

    @property
    def newest(self) -> int:
        """Number of the newest version."""
        return self._newest

    def turn(self) -> None:
        """The version before the newest is the newest from now on, and gets its values by `fill`."""
        self._newest = 1 - self._newest
        for bucket in self._buckets:
            bucket.use_version(self._newest)

    def fill(self, bucket: Bucket) -> None:
        """Begins the bucket's newest version with the values of the one before, for an update of them."""
        flats = self._flats[bucket.number]
        flats[self._newest].copy_(flats[1 - self._newest])

    def point(self, version: int) -> None:
        """Parameters have the memory of this version from now on."""
        if self._shown == version:
            return
        self._shown = version
        for bucket, views in zip(self._buckets, self._views, strict=True):
            for parameter, view in zip(bucket.parameters, views[version], strict=True):
                parameter.data = view

    @property
    def shown(self) -> int:
        """Number of the version that parameters have."""
        return self._shown
