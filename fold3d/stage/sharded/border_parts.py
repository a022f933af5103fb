"""BorderParts: what the ranks of a tensor-parallel group all have is sent to the next stage once, in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fold3d.sharding.sequence import SequenceSplit
from fold3d.tensor_parallel.slices import replace_leaf
from fold3d.trace import SplitError, Trace
from fold3d.trace.results.crossing import Value


class PartOps(Protocol):
    """Of a tensor-parallel group; gradients flow through."""

    size: int

    def scatter_to_sequence_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of `x`, the same on every rank; the gradient is gathered."""

    def gather_from_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns everybody's `x`, one after the other along `dim`; the gradient, the same on every rank, is parted."""


class BorderParts:
    """The scatter/gather optimization of Narayanan et al., "Efficient large-scale language model training on GPU
    clusters" (2021), section 4.1: between stages a rank sends 1 / tp of an activation, and the next stage's ranks
    gather it over the links that they have among themselves; gradients go back alike.

    Only what is the same in every micro-batch decides which tensors travel in parts, since the receiver has no whole
    one to look at: floating point, with a last dimension that divides and is one that the model's weights have, so that
    it does not change with the lengths of samples. Hidden states of which each rank has a part already are left alone.
    """

    def __init__(
        self,
        trace: Trace,
        ranges: Sequence[tuple[int, int]],
        widths: set[int],
        ops: PartOps,
        sequence: Mapping[str, SequenceSplit] | None = None,
    ) -> None:
        """Args:
        ranges: blocks [first, end) of every chunk, cut where `Trace.under` tensor parallelism may be.
        widths: sizes that the model's whole parameters have.
        sequence: blocks that work on parts of the sequence, by name; None: none does.
        """
        self._ops = ops
        self._parted = [
            [
                one.dtype.is_floating_point
                and bool(one.shape)
                and one.shape[-1] % ops.size == 0
                and one.shape[-1] in widths
                and parted not in one.values
                for one in trace.crossings[end]
            ]
            for _, end in ranges[:-1]
            for parted in (_parted_already(trace, end - 1, sequence or {}),)
        ]

    def send(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what this rank sends of what leaves the chunk.

        Raises: SplitError in a form of call for which other tensors do than in the recorded one.
        """
        if len(tensors) != len(self._parted[chunk]):
            raise SplitError(
                f"{len(tensors)} tensors leave chunk {chunk}, {len(self._parted[chunk])} in the recorded call: "
                "with tp > 1 all calls of the model must need the same. Ask for the same outputs in all, or set tp=1"
            )
        return [
            self._ops.scatter_to_sequence_region(tensor, -1) if parted else tensor
            for tensor, parted in zip(tensors, self._parted[chunk], strict=True)
        ]

    def receive(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what the chunk before this one returned; all ranks of the group call."""
        return [
            self._ops.gather_from_region(tensor, -1) if parted else tensor
            for tensor, parted in zip(tensors, self._parted[chunk - 1], strict=True)
        ]


def _parted_already(trace: Trace, block: int, sequence: Mapping[str, SequenceSplit]) -> Value | None:
    """Returns which of the tensors that a block returns is a part of the sequence."""
    split = sequence.get(trace.blocks[block])
    if split is None or split.ends:
        return None
    structure = trace.structures[block]
    numbers = structure.unflatten([torch.tensor(number) for number in range(structure.num_tensors)])
    found: list[int] = []

    def note(number: Tensor) -> Tensor:
        found.append(int(number))
        return number

    replace_leaf(numbers, split.result, note)
    return trace.result(block, found[0]) if found else None
