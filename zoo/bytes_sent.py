"""bytes_sent(): what crosses the borders of a model that is cut, beside what must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fold3d.trace.model_trace import Trace

Run = Callable[[int, list[Tensor]], tuple[list[Tensor], Any]]
"""(chunk, what it receives) -> what it hands on, and the loss of the last."""


@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes of one batch, over all borders together."""

    sent: int
    """What crosses."""
    hidden: int
    """Of it what the block right before a border returned: a model reads no less."""
    needless: int
    """Of it tensors without whose values the loss is the same."""

    def __str__(self) -> str:
        return f"{self.sent} / {self.hidden} / {self.needless}" if self.sent else ""

    @classmethod
    def parse(cls, text: str) -> BytesSent:
        """Returns what `str` wrote."""
        return cls(*(int(one) for one in text.split("/"))) if text else NOTHING


NOTHING = BytesSent(0, 0, 0)
_NOISE = (0.5, 1e3)
"""Of a tensor's numbers; many models round their loss, so what counts for little shows with the second one only."""


def bytes_sent(trace: Trace, ranges: Sequence[tuple[int, int]], crossed: list[list[Tensor]], run: Run) -> BytesSent:
    """Returns what crosses, by running the chunks behind each border again with one tensor disturbed after the other.

    Args:
        crossed: of each border, the tensors that crossed it.
        run: runs a chunk of the model, the same way each time.
    """
    sent = hidden = needless = 0
    for border, tensors in enumerate(crossed):
        before = trace.blocks[ranges[border + 1][0] - 1]
        want = _loss(run, border + 1, tensors, len(ranges))
        for number, (tensor, crossing) in enumerate(zip(tensors, trace.crossings[ranges[border + 1][0]], strict=True)):
            size = tensor.numel() * tensor.element_size()
            sent += size
            hidden += size if any(value.module == before for value in crossing.values) else 0
            if not tensor.is_floating_point():
                continue  # no number near it means nearly the same
            generator = torch.Generator().manual_seed(number)
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * (1.0 + tensor.abs())
            disturbed = ([*tensors[:number], tensor + scale * noise, *tensors[number + 1 :]] for scale in _NOISE)
            same = all(bool(_loss(run, border + 1, one, len(ranges)) == want) for one in disturbed)
            needless += size if same else 0
    return BytesSent(sent, hidden, needless)


def _loss(run: Run, chunk: int, received: list[Tensor], chunks: int) -> Tensor:
    result: Any = None
    while chunk < chunks:
        received, result = run(chunk, [one.clone() for one in received])
        chunk += 1
    loss: Tensor = result
    return loss
