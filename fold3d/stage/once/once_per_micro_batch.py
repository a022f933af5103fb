"""OncePerMicroBatch: a process with several chunks leaves the traces of one forward per micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from fold3d.stage.micro_batch import Inputs, MicroBatch
from fold3d.stage.once.front_buffers import FrontBuffers
from fold3d.trace.errors import SplitError


class OncePerMicroBatch:
    """Around each chunk's run of a micro-batch, in a process that has several.

    The loss function and the model's code in front of its blocks run for every chunk. What they draw from Python's and
    numpy's generators is drawn once (`DrawnNumbers`), what they change of buffers is changed once (`FrontBuffers`); to
    change the micro-batch itself is an error.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._buffers = FrontBuffers(model, blocks)

    @contextlib.contextmanager
    def around(self, chunk: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Around the run of a chunk. Raises: SplitError when the micro-batch was changed in place."""
        before = _versions(micro_batch.inputs)
        with micro_batch.drawn.once(), self._buffers.of_chunk(chunk):
            yield
        changed = [name for name, now in _versions(micro_batch.inputs).items() if now != before[name]]
        if changed:
            raise SplitError(
                f"the loss function or the model's forward changed {changed[0]!r} of the micro-batch in place. They "
                "run once for each chunk of the model, and this process has several, so it would be changed several "
                "times: change a copy, or set segments=1"
            )


def _versions(inputs: Inputs) -> dict[str, int]:
    """Returns how often each tensor was changed in place."""
    return {
        name: value._version for name, value in inputs.items() if isinstance(value, Tensor) and not value.is_inference()
    }
