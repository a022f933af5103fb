"""What modules return: how it is nested (TreeStructure), and which tensors of it cross a border (Crossings).

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
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fold3d.errors import SplitError, TraceError

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeStructure:
    """Nested tuples, lists, dicts or model outputs around tensors and constants.

    Only the tensors are sent between ranks. The rest (nesting, `None`, numbers) is recorded once and is the
    same for every micro-batch; `flatten` checks that.
    """

    spec: TreeSpec
    """Nesting, as torch.utils._pytree describes it."""
    constants: tuple[tuple[int, Any], ...]
    """(leaf index, value) of every leaf that is no tensor, ascending."""
    num_tensors: int
    """Leaves that are tensors."""
    is_tensor: bool
    """True if the block returns one bare tensor (the usual case, which needs no flattening)."""

    @classmethod
    def of(cls, value: Any, where: str) -> TreeStructure:
        """Returns the structure of `value`, which `where` (a module name) returned.

        Raises: TraceError if a leaf is neither a tensor nor a plain constant, or if there is no tensor at
            all.
        """
        leaves, spec = tree_flatten(value)
        constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        for _, leaf in constants:
            if not isinstance(leaf, _CONSTANTS):
                raise TraceError(
                    f"block '{where}' returns a {type(leaf).__name__}, which cannot be sent between ranks: "
                    "only tensors, numbers, strings and None can. Return tensors from the blocks, or "
                    "choose other blocks with the setting `blocks`."
                )
        if len(constants) == len(leaves):
            raise TraceError(
                f"block '{where}' returns no tensor, so nothing can be handed to the next rank. Choose "
                "other blocks with the setting `blocks`."
            )
        return cls(
            spec=spec,
            constants=constants,
            num_tensors=len(leaves) - len(constants),
            is_tensor=isinstance(value, Tensor),
        )

    def flatten(self, value: Any, where: str) -> list[Tensor]:
        """Returns the tensors of `value` in leaf order.

        Raises: SplitError if `value` is nested otherwise than recorded or a constant in it differs.
        """
        if self.is_tensor and isinstance(value, Tensor):
            return [value]
        leaves, spec = tree_flatten(value)
        constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        if spec != self.spec or constants != self.constants:
            raise SplitError(
                f"block '{where}' returned {_describe(spec, constants)}; recorded was "
                f"{_describe(self.spec, self.constants)}. What a block returns besides tensors must be the "
                "same for every micro-batch; pass an `example` that is like the training batches (same "
                "keys, same kind of values). Blocks that return a cache in evaluation do not with "
                "model.config.use_cache = False."
            )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def unflatten(self, tensors: list[Tensor]) -> Any:
        """Returns the recorded structure around `tensors` (as many as `num_tensors`)."""
        if self.is_tensor:
            return tensors[0]
        constants = dict(self.constants)
        rest = iter(tensors)
        total = self.num_tensors + len(constants)
        leaves = [constants[i] if i in constants else next(rest) for i in range(total)]
        return tree_unflatten(leaves, self.spec)


def _describe(spec: TreeSpec, constants: tuple[tuple[int, Any], ...]) -> str:
    fixed = dict(constants)
    leaves = [fixed.get(i, "tensor") for i in range(spec.num_leaves)]
    return str(tree_unflatten(leaves, spec))


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
"""Of one border, in the order in which they are sent: in which they were returned."""
