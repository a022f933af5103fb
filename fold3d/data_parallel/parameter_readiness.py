"""ParameterReadiness: a layer's first forward waits until its own parameters are up to date, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from fold3d.data_parallel.bucket import Bucket
from fold3d.trace.coat import Coat, Wrap


class ParameterReadiness:
    """Which buckets are not up to date, and what must not run before they are."""

    def __init__(
        self,
        coat: Coat,
        model: Module,
        buckets: Sequence[Bucket],
        open_bucket: Callable[[Bucket], None],
        read: Callable[[], None],
    ):
        """Args:
        coat: hooks on the model go with it.
        open_bucket: brings one bucket up to date; blocks until that is done.
        read: called before somebody reads or replaces weights through a state_dict; opens all.
        """
        self._open_bucket = open_bucket
        self._closed: dict[int, Bucket] = {}
        self._of_chunk: dict[int, list[Bucket]] = {}
        of_module: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            for chunk in bucket.spec.chunks:
                self._of_chunk.setdefault(chunk, []).append(bucket)
            for name in bucket.spec.modules:
                of_module.setdefault(name, []).append(bucket)
        for name, waiting in of_module.items():
            coat.put(Wrap.READY, model.get_submodule(name), self._hook(waiting))

        # Whoever reads weights the usual way gets them whole; what is loaded is not stepped once more.
        def before_state_dict(*_: Any) -> None:
            if self._closed:
                read()

        for module in model.modules():
            coat.put(Wrap.READ, module, before_state_dict)
            # Copies and pickles take attributes in their order, and hooks wait for weights.
            vars(module)["_parameters"] = vars(module).pop("_parameters")

    def close(self, bucket: Bucket) -> None:
        """The bucket is about to change: nobody may read it before it is open again."""
        self._closed[bucket.number] = bucket

    def is_closed(self, bucket: Bucket) -> bool:
        """Whether the bucket is not up to date."""
        return bucket.number in self._closed

    def before_chunk(self, chunk: int) -> None:
        """Opens what is read in chunk `chunk` by nobody knows which module."""
        if self._closed:
            self._open(self._of_chunk.get(chunk, ()))

    def open_chunk(self, chunk: int) -> None:
        """Opens all of a chunk's buckets."""
        self._open([bucket for bucket in list(self._closed.values()) if bucket.spec.chunk == chunk])

    def open_all(self) -> None:
        """Brings all parameters of this rank up to date."""
        self._open(list(self._closed.values()))

    def _open(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.number in self._closed:
                self._open_bucket(bucket)
                del self._closed[bucket.number]

    def _hook(self, waiting: Sequence[Bucket]) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            if self._closed:
                self._open(waiting)

        return before_forward
