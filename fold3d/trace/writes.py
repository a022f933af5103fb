"""Writes: which memory is written to in place, where, and by whom.

A chunk leaves out modules with weights in front of it, and runs the model's own code between them. So what that code
writes into a tensor that the chunk received is written again, and what a module writes is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.trace.module_results import Value


@dataclass(frozen=True, slots=True)
class Write:
    """One operation that writes into memory."""

    time: int
    """How many results had been returned."""
    region: int
    """Before which block, or in which."""
    by: Value | None
    """The run of a module with weights; None: the model's own code."""


@dataclass(frozen=True, slots=True)
class _Result:
    key: int
    time: int
    is_own: bool


class Writes:
    """Those of one forward.

    Args:
        key_of: tells memory apart: of tensors that share it the same number.
    """

    def __init__(self, key_of: Callable[[Tensor], int]) -> None:
        self._key_of = key_of
        self._makers: dict[int, Value | None] = {}
        self._results: dict[Value, _Result] = {}
        self._tensors: dict[int, set[int]] = {}
        self._writes: dict[int, list[Write]] = {}

    def made(self, key: int, by: Value | None) -> None:
        """An operation has made memory."""
        self._makers[key] = by

    def written(self, key: int, region: int, by: Value | None) -> None:
        """An operation writes into memory."""
        self._writes.setdefault(key, []).append(Write(len(self._results), region, by))

    def returned(self, value: Value, tensor: Tensor, by: Value) -> None:
        """The run of a module has returned `tensor`, which outlives this object."""
        key = self._key_of(tensor)
        self._results[value] = _Result(key, len(self._results), self._makers.get(key) == by)
        self._tensors.setdefault(key, set()).add(id(tensor))

    def parted(self, output: Any, by: Value) -> Any:
        """Returns what a run of a module returns, with copies of the tensors into whose memory it has written and which
        it was given: who reads a copy has it from the module, and who reads the memory, by a name that it had before,
        reads what a chunk without the module does not have."""
        given: dict[int, Tensor] = {}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and self._is_given(self._key_of(leaf), by):
                given[id(leaf)] = leaf
        if not given or len({self._key_of(leaf) for leaf in given.values()}) < len(given):
            return output  # names of one memory stay such
        copies = {name: leaf.clone() for name, leaf in given.items()}
        return tree_map_only(Tensor, lambda leaf: copies.get(id(leaf), leaf), output)

    def _is_given(self, key: int, by: Value) -> bool:
        return self._makers.get(key) != by and any(write.by == by for write in self._writes.get(key, ()))

    def since(self, value: Value) -> list[Write]:
        """Returns those into a result after it was returned; none of what no module but only a hook has seen."""
        result = self._results.get(value)
        if result is None:
            return []
        return [write for write in self._writes.get(result.key, ()) if write.time > result.time]

    def before(self, border: int, value: Value) -> bool:
        """Whether a result is written to between its return and a border."""
        return any(write.region < border for write in self.since(value))

    def come_again(self, value: Value) -> bool:
        """Whether a chunk that received a copy of the result writes into it, and into nothing else, as the whole model
        does: no module writes, and no other result and nothing that the module was given has the same memory."""
        result, writes = self._results[value], self.since(value)
        alone = result.is_own and len(self._tensors[result.key]) == 1
        return alone and bool(writes) and all(write.by is None for write in writes)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors into which a call of an operator writes."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
