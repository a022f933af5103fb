"""TorchTimeline: what a rank of torch.distributed.pipelining did in a step, as fold3d records it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.cluster.on_rank.virtual_layer import VirtualLayer

RawRecord = tuple[str, str, int, int, int]
"""(lane, action, start, end, bytes); times in ns of the machine's monotonic clock."""


class TorchTimeline:
    """Listens to the layers of one rank; torch's runtime keeps no records."""

    def __init__(self, chunks: Mapping[int, Sequence[VirtualLayer]]) -> None:
        """Args: chunks: this rank's layers, by number of their chunk."""
        self._spans: list[tuple[VirtualLayer, str, int, int]] = []
        self._chunk_of: dict[int, int] = {}
        self._weight_of: dict[int, int] = {}
        for chunk, layers in chunks.items():
            for layer in layers:
                layer.spans = self._spans
                self._chunk_of[id(layer)] = self._weight_of[id(layer.weight)] = chunk
        self._sums: list[list[int]] = []
        self._waited = (0, 0)

    def begin(self) -> None:
        """A step begins; the one before is forgotten."""
        self._spans.clear()
        self._sums = []

    def sum_begins(self, parameter: Tensor, work: Any) -> None:
        """The all-reduce of a layer's gradient is under way."""
        entry = [self._weight_of[id(parameter)], time.monotonic_ns(), 0, parameter.nbytes]
        self._sums.append(entry)

        def ends(_: Any) -> None:
            entry[2] = time.monotonic_ns()

        work.get_future().add_done_callback(ends)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The sums are awaited in its body."""
        start = time.monotonic_ns()
        yield
        self._waited = (start, time.monotonic_ns())

    def records(self) -> list[RawRecord]:
        """Returns the step: passes of whole chunks, the waits between them, the sums and the wait for them."""
        passes = self._passes()
        records: list[RawRecord] = []
        for number, (chunk, kind, micro_batch, start, end) in enumerate(passes):
            if number and passes[number - 1][4] < start:
                awaited = f"{chunk}RECV_{kind}{micro_batch}"
                records.append(("wait", awaited, passes[number - 1][4], start, 0))
            records.append(("compute", f"{chunk}{kind}{micro_batch}", start, end, 0))
        for chunk, start, end, size in self._sums:
            records.append(("reduce", f"{chunk}REDUCE_GRAD", start, max(start, end), size))
        if self._sums:
            records.append(("wait", f"{passes[-1][0]}REDUCE_GRAD", *self._waited, 0))
        return records

    def _passes(self) -> list[tuple[int, str, int, int, int]]:
        """Returns (chunk, kind, micro-batch, start, end) of each pass; a schedule keeps the order of micro-batches."""
        counts: dict[tuple[int, str], int] = {}
        passes: list[tuple[int, str, int, int, int]] = []
        for layer, kind, start, end in self._spans:
            chunk = self._chunk_of[id(layer)]
            number = counts.get((id(layer), kind), 0)
            counts[id(layer), kind] = number + 1
            if passes and passes[-1][:3] == (chunk, kind, number):
                passes[-1] = (*passes[-1][:4], end)
            else:
                passes.append((chunk, kind, number, start, end))
        return passes
