"""BucketTransfers: the sums and gathers of a rank's buckets, which other threads carry out, and the waits for them;
NoReplicas: what carries out those of a single replica, whose gradients lie in buckets where they are late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fold3d import _C
from fold3d.data_parallel.bucket import Bucket
from fold3d.errors import ConfigError
from fold3d.faults.progress import Progress
from fold3d.observe.step_breakdown import RawRecord

_ACTION = {"reduce": "REDUCE_GRAD", "gather": "GATHER"}


class NoReplicas:
    """Stands for a `_C.BucketSync` where there is one replica: sums are what it has."""

    by_library = False

    def begin(self, step: int, gather_order: list[int]) -> None:
        """Nobody else begins."""

    def reduce(self, bucket: int, gradients: Tensor, scale: float, as_bfloat16: bool = False) -> None:
        """The mean of one."""

    def gather(self, bucket: int, tensor: Tensor, as_bfloat16: bool = False) -> None:
        """The shard is the whole."""

    def wait_reduced(self, bucket: int, step: int | None = None) -> None:
        """Returns."""

    def wait_gathered(self, bucket: int) -> None:
        """Returns."""

    def is_gathered(self, bucket: int) -> bool:
        """Always."""
        return True

    def drain(self) -> None:
        """Returns."""

    def bandwidth(self) -> float:
        """Nothing is sent."""
        return 0.0

    sustained_bandwidth = bandwidth

    def take_records(self) -> list[Any]:
        """Returns none."""
        return []

    def abort(self, reason: str) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


class BucketTransfers:
    """Hands buckets to the rings; all replicas of a stage make the same calls in the same order of buckets.

    Waits end with an error when the job has failed or a replica does not come within comm_timeout.
    """

    def __init__(
        self,
        sync: _C.BucketSync | NoReplicas,
        buckets: Sequence[Bucket],
        replicas: int,
        progress: Progress,
        clock: _C.StreamClock,
        wire_dtype: torch.dtype = torch.float32,
    ):
        """Args:
        clock: of the device, for the waits.
        wire_dtype: bfloat16: gradients are rounded to it for each journey, added in float32, and the sums are rounded
            to it, so that gathers of them change nothing. Sums over tied weights come after that and are gathered as
            they are, as weights are. float32: everything is sent as it is.
        Raises: ConfigError for gradients that are not float32, and would lose what they are kept in.
        """
        self._rounds = wire_dtype == torch.bfloat16
        for bucket in buckets if self._rounds else ():
            if bucket.gradients.dtype != torch.float32:
                raise ConfigError(
                    f'dp_sync_dtype="bfloat16": {bucket.names[0]} has gradients of {bucket.gradients.dtype}, and only '
                    'those of float32 are rounded; set dp_sync_dtype="float32"'
                )
        self._sync, self._buckets, self._progress, self._clock = sync, buckets, progress, clock
        self._factor = 1.0 / replicas
        self._step = 0
        self._waits: deque[tuple[str, _C.Moment, _C.Moment]] = deque()

    @property
    def step(self) -> int:
        """How many steps have begun."""
        return self._step

    def begin(self, gather_order: Sequence[int]) -> None:
        """A step begins.

        Args:
            gather_order: numbers of the buckets whose sums are gathered by themselves, each once it is complete.
        """
        self._step += 1
        self._sync.begin(self._step, list(gather_order))

    def reduce(self, bucket: Bucket) -> None:
        """Begins the mean of the bucket's gradients over the replicas; each replica gets its shard of it."""
        self._sync.reduce(bucket.key, bucket.gradients, self._factor, self._rounds)

    def gather_gradients(self, bucket: Bucket) -> None:
        """Begins to put together the bucket's gradients from the shards of all replicas, once these are summed."""
        rounded = self._rounds and not bucket.spec.summed_over.is_shared
        self._sync.gather(bucket.key, bucket.gradients, rounded)

    def gather_weights(self, bucket: Bucket) -> None:
        """Begins to put together the bucket's flat weights from the shards of all replicas."""
        assert bucket.weights is not None
        self._sync.gather(bucket.key, bucket.weights)

    def wait_reduced(self, step: int | None = None) -> None:
        """Waits until all buckets' sums of this step, or of `step`, are here; on an accelerator until they are on their
        way, and the current stream waits for the rest."""
        start = self._clock.now()
        with self._progress.during(f"the gradient sums of step {self._step if step is None else step}", meets=True):
            for bucket in self._buckets:
                self._sync.wait_reduced(bucket.key, step)
        last = self._buckets[0].spec.chunk if self._buckets else 0
        self._waits.append((f"{last}REDUCE_GRAD", start, self._clock.now()))

    def wait_gathered(self, bucket: Bucket) -> None:
        """Waits until the bucket's last gather is done; as `wait_reduced`."""
        if self._sync.is_gathered(bucket.key):
            self._sync.wait_gathered(bucket.key)  # at once, for the host
            return
        start = self._clock.now()
        with self._progress.during(f"the gather of step {self._step}", meets=True):
            self._sync.wait_gathered(bucket.key)
        self._waits.append((f"{bucket.spec.chunk}GATHER", start, self._clock.now()))

    def drain(self) -> None:
        """Waits until all that could begin is done, on an accelerator, too."""
        with self._progress.during(f"the end of the sums and gathers of step {self._step}", meets=True):
            self._sync.drain()

    def take_records(self) -> list[RawRecord]:
        """Returns the transfers and the waits since the last call, by chunk; as far as their times are known."""
        waits: list[RawRecord] = []
        while self._waits:
            action, start, end = self._waits[0]
            start_ns, end_ns = start.ns(), end.ns()
            if start_ns is None or end_ns is None:
                break
            waits.append(("wait", action, start_ns, end_ns, 0))
            self._waits.popleft()
        chunk_of = {f"bucket {key}": bucket.spec.chunk for bucket in self._buckets for key in bucket.keys}
        transfers = [
            (lane, f"{chunk_of[text]}{_ACTION[lane]}", start, end, size)
            for lane, text, start, end, size in self._sync.take_records()
        ]
        return [*waits, *transfers]

    @property
    def by_library(self) -> bool:
        """Whether a library's collectives carry the buckets, which all replicas of the stage move and time together."""
        return self._sync.by_library

    def bandwidth(self, *, sustained: bool = False) -> float:
        """Returns the measured bytes per second that this rank sends; 0.0 when nothing was measured yet.

        Args:
            sustained: in the long run; else what it reached of late.
        """
        return self._sync.sustained_bandwidth() if sustained else self._sync.bandwidth()

    def abort(self, reason: str) -> None:
        """Ends all communication; any thread."""
        self._sync.abort(reason)

    def close(self) -> None:
        """Ends the threads."""
        self._sync.close()
