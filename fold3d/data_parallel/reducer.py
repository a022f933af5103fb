"""Reducer: gives buckets to the network the moment their gradients are complete, in one order on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.nn import Parameter

from fold3d.data_parallel.bucket import Bucket
from fold3d.errors import ConfigError
from fold3d.trace.coat import Coat, Wrap


class Reducer:
    """Counts gradients as backward passes produce them.

    A parameter gets one gradient per micro-batch from every chunk that reads it, so a bucket is complete when all of
    them have come, layer by layer within a chunk's last backward; what a micro-batch did not use is complete when the
    chunk's last backward is. Replicas may complete buckets in different orders; all hand them over in the planned one.
    """

    def __init__(
        self,
        coat: Coat,
        buckets: Sequence[Bucket],
        uses: Mapping[str, int],
        push: Callable[[Bucket], None],
        is_stale: Callable[[Bucket], bool],
    ):
        """Args:
        coat: hooks on the parameters go with it.
        uses: parameter name -> chunks of this rank that read it.
        push: called on the thread that runs backward.
        is_stale: whether the bucket's parameters are still those of the step before.
        """
        self._is_stale = is_stale
        self._buckets = list(buckets)
        self._push = push
        self._uses = [sum(uses[name] for name in bucket.names) for bucket in self._buckets]
        self._missing = [0] * len(self._buckets)
        self._complete = [True] * len(self._buckets)
        self._order: list[int] = []
        self._next = 0
        self._held = False
        for position, bucket in enumerate(self._buckets):
            for index, parameter in enumerate(bucket.parameters):
                hook, is_trained = self._hook(position, bucket, index), parameter.requires_grad
                parameter.requires_grad_(True)  # torch hooks no frozen one, which may be trained later
                coat.put(Wrap.GRADIENT, parameter, hook)
                parameter.requires_grad_(is_trained)

    def begin(self, micro_batches: int, chunks: Sequence[int], *, hold: bool) -> None:
        """Starts a step.

        Args:
            chunks: of this rank, in the order of their last backwards.
            hold: hand nothing over before `release`.
        """
        self._missing = [uses * micro_batches for uses in self._uses]
        self._complete = [False] * len(self._buckets)
        of_chunk = {chunk: [k for k, b in enumerate(self._buckets) if b.spec.chunk == chunk] for chunk in chunks}
        self._order = [k for chunk in chunks for k in reversed(of_chunk[chunk])]
        self._next = 0
        self._held = hold

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done: its buckets are complete, whatever was used."""
        for position, bucket in enumerate(self._buckets):
            if bucket.spec.chunk == chunk:
                self._complete[position] = True
        self._advance()

    def release(self) -> None:
        """Hands over what was held."""
        self._held = False
        self._advance()

    def _hook(self, position: int, bucket: Bucket, index: int) -> Callable[[Parameter], None]:
        def accumulated(_: Parameter) -> None:
            if self._complete[position]:
                self._refuse_late(bucket.names[index])
            if self._is_stale(bucket):
                raise ConfigError(
                    f"{bucket.names[index]} was read before it was up to date, through memory that has another name "
                    "(a view or .data, kept from before); pass reads_weights=True to Engine.run"
                )
            bucket.accumulate(index)
            self._missing[position] -= 1
            if self._missing[position] == 0:
                self._complete[position] = True
                self._advance()

        return accumulated

    def _advance(self) -> None:
        while not self._held and self._next < len(self._order) and self._complete[self._order[self._next]]:
            bucket = self._buckets[self._order[self._next]]
            self._next += 1
            self._push(bucket)

    @staticmethod
    def _refuse_late(name: str) -> None:
        raise ConfigError(
            f"{name} got another gradient after its sum over the replicas had begun: the loss function reads the "
            "weight itself (a penalty on weights does; set pp=1 and segments=1), one micro-batch gave it several "
            "gradients (a reentrant checkpoint inside a block does; use recompute=True instead of the model's own "
            "checkpointing), or backward ran outside the engine"
        )
