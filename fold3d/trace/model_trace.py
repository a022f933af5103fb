"""Trace: what one recorded forward says about a model: its blocks, what lies around them, and where it may be
cut.

Words used here. Blocks are numbered 0 .. n-1 in execution order. Region k (0 <= k < n) is everything that
runs after block k-1 has returned until block k has returned; region n is everything after the last block.
Border k (1 <= k < n) lies between block k-1 and region k: a chunk that starts at block k receives what block
k-1 returned and runs region k itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fold3d.errors import TraceError
from fold3d.trace.arguments import Form
from fold3d.trace.structure import TreeStructure


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """Size of a block, or of everything before the first or after the last block."""

    name: str
    """Module name of the block, or "prologue" or "epilogue"."""
    parameters: int
    """Number of parameter elements (a tensor with several names counts once)."""
    flops: int
    """Floating-point operations of one forward of the recorded example (a multiply-add counts as two)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One recorded forward of a model; see `fold3d.trace.trace`. Holds names and numbers, no tensors."""

    blocks: tuple[str, ...]
    """Module names of the blocks, execution order."""
    prologue: tuple[str, ...]
    """Top-most modules outside the blocks that run before the first block, execution order."""
    epilogue: tuple[str, ...]
    """The same after the last block. A module that runs on both sides is in both."""
    between: tuple[str, ...]
    """The same between two blocks."""
    shared: tuple[str, ...]
    """Parameters that code outside of any block or prologue module reads (such as those held directly by the
    model):
    every chunk owns them."""
    direct: tuple[str, ...]
    """Parameters that code outside of the modules that hold them reads, anywhere; by one of their names."""
    uses: tuple[tuple[str, ...], ...]
    """Names of the parameters that each region needs (length: blocks + 1). A parameter that nothing reads is
    in region 0."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of names that are one tensor; the first is the canonical name."""
    structures: tuple[TreeStructure, ...]
    """What each block returns."""
    shapes: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]
    """(shape, dtype) of each tensor that each block returned for the recorded example."""
    modified: tuple[bool, ...]
    """Per block: later code writes into the returned tensors in place, so a receiver must work on a copy."""
    borders: tuple[str, ...]
    """Per border (length: blocks; entry 0 is the model's start and always free): empty if the model may be
    cut there,
    else the reason why not."""
    costs: tuple[BlockCost, ...]
    """Size of each block."""
    prologue_cost: BlockCost
    epilogue_cost: BlockCost
    leaks: tuple[str, ...] = ()
    """What is read of blocks otherwise than by the code behind them up to the next one, from what they returned."""
    unread: tuple[str, ...] = ()
    """Parameters that nothing reads in the recorded call."""
    form: Form = ()
    """Of the recorded call."""
    kept: tuple[str, ...] = ()
    """Attributes in which modules keep tensors of a forward, for whoever reads them."""

    @property
    def uniform(self) -> bool:
        """Whether all blocks return the same: as many tensors, of the same shapes, in the same structure."""
        return len(set(self.shapes)) == 1 and all(s == self.structures[0] for s in self.structures)

    def check_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Checks that `ranges` ([first, end) block of every chunk) cover all blocks once and cut only where
        possible.

        Raises: TraceError that names the range and the reason.
        """
        position = 0
        for chunk, (lo, hi) in enumerate(ranges):
            if lo != position or hi <= lo:
                raise TraceError(
                    f"chunk {chunk} has the blocks [{lo}, {hi}) but must start at block {position} and "
                    f"have at least one: the chunks must cover the {len(self.blocks)} blocks in order"
                )
            position = hi
        if position != len(self.blocks):
            raise TraceError(f"the chunks end at block {position}, but the model has {len(self.blocks)} blocks")
        for lo, _ in ranges[1:]:
            if self.borders[lo]:
                raise TraceError(
                    f"the model cannot be cut before block '{self.blocks[lo]}': {self.borders[lo]}. Use "
                    "fewer chunks (pp * segments), or name other blocks with the setting `blocks`."
                )

    def canonical(self) -> dict[str, str]:
        """Returns {name: canonical name} for every name of a tied parameter."""
        return {name: group[0] for group in self.tied for name in group}
