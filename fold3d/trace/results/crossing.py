"""Crossings: the values that are made in front of a border between two blocks and read behind it.

A chunk runs the whole model's forward and leaves out the modules in front of it that have weights: the blocks, and what
lies around them. So nothing but what these modules return is missing there; all else, masks, positions, sums of several
of them, dropout between them, the model's own code makes again. What has to cross a border is therefore found among the
modules' results: those tensors from whose values anything is computed, behind the border, that a module or the model's
own code reads there. They go from chunk to chunk until the last one that reads them, and stand where the modules would
have returned them. Backwards their gradients go the same way, and each chunk adds those of its own readers.

The blocks of several stacks (an encoder's and a decoder's, two towers) are one row in the order in which they run, so a
border may lie in any of them and between them.

A tensor that several modules return as it is (a position bias that every block hands on) crosses once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

INSIDE = -1
"""Value.tensor of whatever a module makes and does not return."""


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """A tensor that a module returned."""

    module: str
    call: int
    """How often the module had been called before, in this forward, by what is no module with weights itself."""
    tensor: int
    """Its number among the tensors of what was returned, in the order of the leaves."""


@dataclass(frozen=True, slots=True)
class Token:
    """Where a value comes from: something that was returned in that region by a module with parameters, or made in it
    and not returned."""

    region: int
    value: Value

    def said(self, reader: str) -> str:
        """Returns that `reader` reads it later."""
        inside = self.value.tensor == INSIDE
        what = f"a tensor made in '{self.value.module}'" if inside else f"what '{self.value.module}' returned"
        return f"{what} is read again later, in '{reader}'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """One tensor that crosses a border."""

    values: tuple[Value, ...]
    """All modules' results that are this very tensor, in the order in which they were returned."""
    shape: tuple[int, ...]
    """Of the recorded example."""
    dtype: torch.dtype
    modified: bool
    """Later code writes into it in place, so a receiver must work on a copy: it writes again what the model's own code
    has written."""
    written_before: bool = False
    """Code in front of the border does so, and what is sent is a copy of what the module returned."""

    @property
    def bytes(self) -> int:
        """Of the recorded example."""
        return prod(self.shape) * self.dtype.itemsize


Crossings = tuple[Crossing, ...]
"""Of one border, in the order in which they travel: in which they were returned."""
