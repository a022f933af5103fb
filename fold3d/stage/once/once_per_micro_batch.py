"""OncePerMicroBatch: a process in which code runs several times leaves the traces of one forward per micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from fold3d.stage.micro_batch import Inputs, MicroBatch
from fold3d.stage.once.changed_buffers import ChangedBuffers
from fold3d.trace.errors import SplitError

Run = Literal["only", "first", "again"]
"""Of a chunk with a micro-batch: its graph stays; it will run once more, for the graph; it does so."""


class OncePerMicroBatch:
    """Around each chunk's run of a micro-batch, in a process that has several, or where a chunk runs twice.

    The loss function and the model's code in front of its blocks run for every chunk, and all of a chunk that
    recomputes runs again. What is drawn from Python's and numpy's generators is drawn once (`DrawnNumbers`), what is
    changed of buffers and modules' attributes is changed once (`ChangedBuffers`); to change the micro-batch itself is
    an error.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._buffers = ChangedBuffers(model, blocks)

    @contextlib.contextmanager
    def around(self, chunk: int, micro_batch: MicroBatch, run: Run = "only") -> Iterator[None]:
        """Around the run of a chunk. Raises: SplitError when the micro-batch was changed in place."""
        inputs, again = _versions(micro_batch.inputs), run == "again"
        if again:
            buffers = self._buffers.again(micro_batch.before)
        else:
            buffers = self._buffers.of_chunk(chunk, micro_batch.before, recomputes=run == "first")
        with micro_batch.drawn.once(chunk, again=again), buffers:
            yield
        changed = [name for name, now in _versions(micro_batch.inputs).items() if now != inputs[name]]
        if changed:
            raise SplitError(
                f"the loss function or the model's forward changed {changed[0]!r} of the micro-batch in place. They "
                "run several times in this process, once for each chunk of the model and again for each that "
                "recomputes, so it would be changed several times: change a copy, or set segments=1 and "
                'recompute="none"'
            )


def _versions(inputs: Inputs) -> dict[str, int]:
    """Returns how often each tensor was changed in place."""
    return {
        name: value._version for name, value in inputs.items() if isinstance(value, Tensor) and not value.is_inference()
    }
