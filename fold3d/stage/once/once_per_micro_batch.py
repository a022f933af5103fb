"""OncePerMicroBatch: a process in which code runs several times leaves the traces of one forward per micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from fold3d.stage.loss.loss_run import ModelCall
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.once.changed_buffers import ChangedBuffers
from fold3d.trace.errors import SplitError

Run = Literal["only", "first", "again"]
"""Of a chunk with a micro-batch: its graph stays; it will run once more, for the graph; it does so."""


class OncePerMicroBatch:
    """Around each chunk's run of a micro-batch, in a process that has several, or where a chunk runs twice.

    The model's code in front of its blocks runs for every chunk, and all of a chunk that recomputes runs again. What is
    drawn from Python's and numpy's generators is drawn once (`DrawnNumbers`), what is changed of buffers and modules'
    attributes is changed once (`ChangedBuffers`); to change what the model is called with is an error.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._buffers = ChangedBuffers(model, blocks)

    @contextlib.contextmanager
    def around(self, chunk: int, micro_batch: MicroBatch, run: Run = "only") -> Iterator[None]:
        """Around the model's forward as a chunk. Raises: SplitError when that changed what it was called with."""
        inputs, again = _versions(micro_batch.loss.call), run == "again"
        if again:
            buffers = self._buffers.again(micro_batch.before)
        else:
            buffers = self._buffers.of_chunk(chunk, micro_batch.before, recomputes=run == "first")
        with micro_batch.drawn.once(chunk, again=again), buffers:
            yield
        changed = [name for name, now in _versions(micro_batch.loss.call).items() if now != inputs[name]]
        if changed:
            raise SplitError(
                f"the model's forward changed its argument {changed[0]!r} in place. It runs several times in this "
                "process, once for each chunk of the model and again for each that recomputes, so that would be "
                'changed several times: change a copy, or set segments=1 and recompute="none"'
            )


def _versions(call: ModelCall | None) -> dict[str, int]:
    """Returns how often each tensor among the arguments was changed in place."""
    given = {} if call is None else call.named()
    return {
        name: value._version for name, value in given.items() if isinstance(value, Tensor) and not value.is_inference()
    }
