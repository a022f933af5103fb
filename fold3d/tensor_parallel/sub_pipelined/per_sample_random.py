"""PerSampleRandom: part of a batch draws the random numbers that the whole batch would have drawn for it."""

from __future__ import annotations

from torch import Tensor

from fold3d.tensor_parallel.partial_draws import PartialDraws, Size


class PerSampleRandom(PartialDraws):
    """While it is entered, random functions draw for all samples and take those of [first, end).

    Tensors whose dimension 0 is a multiple of the samples' number follow the samples, which is the caller's to check.
    """

    def __init__(self, first: int, end: int, samples: int) -> None:
        super().__init__()
        self._first, self._end, self._samples = first, end, samples
        self.used = False
        """Whether anything was drawn."""

    def whole_of(self, size: Size, number: int) -> Size | None:
        mine = self._end - self._first
        if not size or size[0] % mine:
            return None
        return (size[0] // mine * self._samples, *size[1:])

    def part(self, drawn: Tensor) -> Tensor:
        each = drawn.shape[0] // self._samples
        self.used = True
        return drawn[self._first * each : self._end * each]
