"""BlockSplit: what a rank of a tensor-parallel group holds of a block, and does differently in its forward;
SequenceSplit: how the block works on a part of the sequence outside of its regions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from fold3d.sharding.shard import Runs, Shard, Slices

Path = tuple[int | str, ...]
"""Of a tensor in a block's arguments or result: the position or name of the argument, then keys inside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSplit:
    """A region of a block that each rank computes for its share of the units: heads, groups of heads, neurons.

    Names are of modules and parameters, relative to the block.
    """

    units: int
    """What it is made of; each rank computes as many."""
    entries: tuple[str, ...]
    """Modules of which a rank computes some output channels; what they take enters the region (Megatron's f)."""
    exits: tuple[str, ...]
    """Modules of which a rank has some input channels; what they return is summed over the ranks (Megatron's g)."""
    copied: Mapping[str, Runs] = field(default_factory=dict)
    """Modules that every rank computes whole, and whose output channels in these runs enter the region."""
    shared: tuple[str, ...] = ()
    """Whole parameters which a module of `exits` adds to what is summed: each rank adds an equal part of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribute:
    """An integer on a module of a block, such as a number of heads, that has another value on a rank."""

    module: str
    name: str
    """`config.NAME` is an attribute of the module's configuration, of which the module gets a copy of its own."""
    whole: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice(Slices):
    """A tensor that a block takes or returns, of which a rank's region uses or makes a part."""

    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerResult:
    """The tensors that a block, or a module inside of it, returns beside what later blocks read, by their places: hooks
    or the model's own code may hand them to the model's caller.

    What is in none of these, a rank may have otherwise than one that computes the whole block, and it is not known how.
    """

    module: str
    """Relative to the block; empty: the block itself."""
    whole: tuple[Path, ...] = ()
    """Every rank has all of them."""
    slices: tuple[TensorSlice, ...] = ()
    """Each rank has its units'."""
    rows: tuple[Path, ...] = ()
    """Each rank has its part of the sequence."""
    folded: tuple[Path, ...] = ()
    """The same, and samples and their sequences lie in one dimension, the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSplit:
    """How a block is spread over a tensor-parallel group. Without groups it is whole on every rank."""

    groups: tuple[GroupSplit, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """Of the block's parameters, by name relative to the block."""
    attributes: tuple[Attribute, ...] = ()
    whole_sizes: bool = False
    """Whether its code asks for views by sizes of the whole (`WholeSizes`)."""
    inputs: tuple[TensorSlice, ...] = ()
    """Arguments of which a rank's region takes its part."""
    entering: tuple[Path, ...] = ()
    """Arguments that a region reads whole: their gradient is summed over the ranks, if they have one."""
    outputs: tuple[TensorSlice, ...] = ()
    """Results of which a rank makes its part; they are put together before they leave the block."""
    together: tuple[tuple[str, ...], ...] = ()
    """Linear layers that enter regions with the same tensor, which nothing else there takes; each is called once."""
    draws: tuple[Slices | None, ...] = ()
    """Random numbers of which each rank needs those of its units, a dropout's mask over heads, say, in the order in
    which the block draws in training; None: drawn alike on every rank; NOT_KNOWN: it must draw nothing there. Empty: it
    draws nothing, or it is not known how; then each rank draws for itself inside a region."""
    inner: tuple[InnerResult, ...] = ()
    """What it and modules inside return; those that return one tensor, which is whole, are left out."""
    unrun: tuple[str, ...] = ()
    """Modules with parameters that did not run when it was proved."""
    unread: tuple[str, ...] = ()
    """Parameters of the others that nothing read then."""
    operators: tuple[int, ...] = field(default=(), compare=False)
    """What ranks ran of torch when it was proved, as numbers (`_C.OperatorRun`)."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of modules and parameters that hold weights, by relative name: why they are split as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathering:
    """A tensor that a module of a block takes, of which each rank has a part of the sequence, and the module all."""

    module: str
    """Relative to the block."""
    path: Path
    """Of the argument."""
    sums: bool
    """Whether the ranks have different shares of its gradient; otherwise it is the same on each."""
    folded: bool = False
    """Whether samples and their sequences lie in one dimension, the first, as experts take tokens."""
    readers: tuple[str, ...] = ()
    """Linear layers that enter regions with just this tensor; each is called once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSplit:
    """What a block does differently where the ranks of a tensor-parallel group share the sequence of its hidden state
    (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2.2).

    Parts are consecutive; their lengths differ by one at most, the longer ones first. The block's exits, which sum over
    the ranks without it, leave each rank its part of the sum.
    """

    hidden: Path
    """Of the hidden state in the block's arguments."""
    result: Path
    """Of the hidden state in its result."""
    dim: int
    """Of the sequence, in the hidden state."""
    gathers: tuple[Gathering, ...]
    begins: bool = True
    """Whether it is given the whole hidden state: the first of the blocks that hand parts to each other."""
    ends: bool = True
    """Whether it returns the whole hidden state: the last of them."""
    inner: tuple[InnerResult, ...] = ()
    """As `BlockSplit.inner`, where the sequence is shared."""
    operators: tuple[int, ...] = field(default=(), compare=False)
    """As `BlockSplit.operators`, where the sequence is shared."""


_AS_LISTS = (Attribute, Gathering, InnerResult)
"""Of which there are many."""


def as_json(value: Any) -> Any:
    """Returns a value of this component as JSON has it."""
    if is_dataclass(value):
        found = {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
        return list(found.values()) if isinstance(value, _AS_LISTS) else found
    if isinstance(value, Mapping):
        return {key: as_json(one) for key, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, (list, tuple)) else value
