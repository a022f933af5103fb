"""Cargo: the tensors that cross the borders of one chunk in one run of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fold3d.stage.blocks.hooked_modules import BlockRun, show
from fold3d.tensor_parallel.results.lazy_whole import plain_parts
from fold3d.trace.errors import SplitError
from fold3d.trace.model_trace import Trace
from fold3d.trace.results.crossing import Crossing, Crossings, Value
from fold3d.trace.results.structure import TreeStructure


class Borders:
    """What crosses the borders of chunks in one form of call."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._alike_from: dict[int, int] = {}
        self._shows: dict[int, bool] = {}
        self._around = frozenset(name for region in trace.around for name in region)

    def cargo(self, first: int, end: int, received: Sequence[Tensor], *, leaves: bool) -> Cargo:
        """Returns what a run of the blocks [first, end) takes and hands on.

        Args:
            leaves: whether anything is handed on.
        Raises: SplitError for another number of tensors.
        """
        trace = self._trace
        arriving = trace.crossing(first) if first else ()
        if len(received) != len(arriving):
            where = f"before block '{trace.blocks[first]}'" if first < len(trace.blocks) else "behind the last block"
            takes = f"{len(arriving)} cross the border {where}" if first else "the first chunk takes none"
            raise SplitError(f"the chunk from block {first} on was given {len(received)} tensors, but {takes}")
        return Cargo(arriving, trace.crossing(end) if leaves else (), received)

    def runs(self, module: str) -> bool:
        """Returns whether this form of call runs a module around the blocks."""
        return module in self._around

    def structure(self, block: int) -> TreeStructure:
        """Returns the structure of what a block returns."""
        return self._trace.structures[block]

    def begin(self, block: int) -> BlockRun:
        """A block begins in its chunk."""
        return BlockRun(self._trace.hooked[block])

    def show(self, first: int, block: int, model: nn.Module, cargo: Cargo, arguments: Any) -> None:
        """Shows hooks inside of a block before `first` what was received of their modules' results, and which of the
        block's arguments, (args, kwargs), these were given."""
        if self._shows_before(first):
            show(model, self._trace.hooked[block], cargo.arrived, tree_leaves(plain_parts(arguments)))

    def alike(self, first: int, cargo: Cargo) -> tuple[int, Any]:
        """Returns the first of the blocks before `first` for which the last of them can stand, and what that
        returned."""
        trace = self._trace
        if first not in self._alike_from:
            self._alike_from[first] = trace.alike_from(first) if first else 0
        alike = self._alike_from[first]
        if alike == first or self._shows_before(first):
            return first, None
        return alike, cargo.whole(trace.blocks[first - 1], trace.calls[first - 1], trace.structures[first - 1])

    def _shows_before(self, first: int) -> bool:
        if first not in self._shows:
            self._shows[first] = any(self._trace.hooked[:first])
        return self._shows[first]


class Cargo:
    """What the chunk received stands where the modules before it would have returned it; what it hands on are such
    tensors that a later chunk reads, too, and those that its own modules return.

    One that is received and handed on is the same tensor, so autograd adds the gradient that comes back for it to those
    of its readers here.

    Args:
        arriving: what crosses the border before the chunk.
        leaving: what crosses the border behind it.
        received: a tensor for each of `arriving`.
    """

    def __init__(self, arriving: Crossings, leaving: Crossings, received: Sequence[Tensor]) -> None:
        self._leaving = leaving
        self.arrived: dict[tuple[str, int], dict[int, Tensor]] = {}
        self._leaves: dict[Value, Tensor] = {}
        self._wanted: dict[tuple[str, int], list[Value]] = {}
        for crossing in leaving:
            for value in crossing.values:
                self._wanted.setdefault((value.module, value.call), []).append(value)
        self._written = {value for crossing in leaving if crossing.written_before for value in crossing.values}
        wanted = {value for crossing in leaving for value in crossing.values}
        for crossing, tensor in zip(arriving, received, strict=True):
            # Code that writes into a module's result would write into a leaf, which autograd forbids.
            mine = tensor.clone() if crossing.modified else tensor
            for value in crossing.values:
                self.arrived.setdefault((value.module, value.call), {})[value.tensor] = mine
                if value in wanted:
                    self._leaves[value] = tensor.view_as(tensor) if tensor.requires_grad else tensor

    def whole(self, module: str, call: int, structure: TreeStructure) -> Any:
        """Returns what the module returned, `structure`, when all of its tensors were received; else None."""
        tensors = self.arrived.get((module, call), {})
        if len(tensors) < structure.num_tensors:
            return None
        return structure.unflatten([tensors[number] for number in range(structure.num_tensors)])

    def put_into(self, module: str, call: int, stand_in: Any) -> Any:
        """Returns `stand_in`, of the structure that the module returns, with the tensors that were received."""
        tensors = self.arrived.get((module, call))
        if not tensors:
            return stand_in
        leaves, spec = tree_flatten(stand_in)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for number, tensor in tensors.items():
            if number >= len(places):
                raise _otherwise(module)
            leaves[places[number]] = tensor
        return tree_unflatten(leaves, spec)

    def note(self, module: str, call: int, output: Any, structure: TreeStructure | None = None) -> None:
        """The chunk has run the module, which returned `output`: keeps what leaves.

        Raises: SplitError when it returned something else than recorded.
        """
        values = self._wanted.get((module, call))
        if values is None:
            return
        if structure is not None:
            tensors = structure.flatten(plain_parts(output), module)
        else:
            tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        for value in values:
            if value.tensor >= len(tensors):
                raise _otherwise(module)
            tensor = tensors[value.tensor]
            self._leaves[value] = tensor.clone() if value in self._written else tensor

    def leave(self) -> list[Tensor]:
        """Returns the tensors that the chunk hands on. Raises: SplitError when one is missing."""
        return [self._of(crossing) for crossing in self._leaving]

    def _of(self, crossing: Crossing) -> Tensor:
        for value in crossing.values:
            if value in self._leaves:
                return self._leaves[value]
        value = crossing.values[0]
        raise SplitError(
            f"module '{value.module}' was called fewer times than recorded, and a later chunk needs what call "
            f"{value.call + 1} returned; pass an `example` that is like the training batches"
        )


def _otherwise(module: str) -> SplitError:
    return SplitError(
        f"module '{module}' returned fewer tensors than recorded; pass an `example` that is like the training batches"
    )
