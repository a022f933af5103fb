"""HookedCall: a module inside of a block whose result its hooks see, and may hand to somebody who reads it later."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.trace.results.structure import TreeStructure


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedCall:
    """One call of such a module, in one run of a block."""

    module: str
    call: int
    """As `Value.call`: how often the module had been called before in the forward."""
    place: int
    """How often in this run of the block."""
    structure: TreeStructure
    """Of what it returned."""
    given: tuple[int, ...] = ()
    """Of its first arguments, those that the block was given, each by its number among the leaves of the block's."""
