"""BlockSplit: what a rank of a tensor-parallel group holds of a block, and does differently in its forward;
SequenceSplit: how the block works on a part of the sequence outside of its regions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fold3d.sharding.shard import Runs, Shard

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

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {
            "units": self.units,
            "entries": list(self.entries),
            "exits": list(self.exits),
            "copied": {name: [list(run) for run in runs] for name, runs in self.copied.items()},
            "shared": list(self.shared),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GroupSplit:
        """Returns what `to_json` made."""
        return cls(
            units=value["units"],
            entries=tuple(value["entries"]),
            exits=tuple(value["exits"]),
            copied={name: runs_from_json(runs) for name, runs in value["copied"].items()},
            shared=tuple(value["shared"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribute:
    """An integer on a module of a block, such as a number of heads, that has another value on a rank."""

    module: str
    name: str
    """`config.NAME` is an attribute of the module's configuration, of which the module gets a copy of its own."""
    whole: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """A tensor that a block takes or returns, of which a rank's region uses or makes a part.

    Along `dim` the units repeat every `period` indices, as where samples and heads lie in one dimension.
    """

    path: Path
    dim: int
    period: int
    parts: tuple[Runs, ...]
    """Per rank, within one period."""


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

    def to_json(self) -> list[Any]:
        """Returns it as JSON values."""
        whole, rows, folded = (list(map(list, paths)) for paths in (self.whole, self.rows, self.folded))
        return [self.module, whole, list(map(_slice_to_json, self.slices)), rows, folded]

    @classmethod
    def from_json(cls, value: list[Any]) -> InnerResult:
        """Returns what `to_json` made."""
        module, whole, slices, rows, folded = value
        return cls(
            module=module, whole=tuple(map(tuple, whole)), slices=tuple(map(_slice_from_json, slices)),
            rows=tuple(map(tuple, rows)), folded=tuple(map(tuple, folded)),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Random numbers that a block draws, of which each rank needs those of its units: a dropout's mask over heads, say.

    Along `dim` there are `whole` entries, or a multiple of it, such as where samples and heads lie in one dimension.
    """

    dim: int
    whole: int
    parts: tuple[Runs, ...]
    """Per rank, of `whole`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSplit:
    """How a block is spread over a tensor-parallel group. Without groups it is whole on every rank."""

    groups: tuple[GroupSplit, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """Of the block's parameters, by name relative to the block."""
    attributes: tuple[Attribute, ...] = ()
    inputs: tuple[TensorSlice, ...] = ()
    """Arguments of which a rank's region takes its part."""
    entering: tuple[Path, ...] = ()
    """Arguments that a region reads whole: their gradient is summed over the ranks, if they have one."""
    outputs: tuple[TensorSlice, ...] = ()
    """Results of which a rank makes its part; they are put together before they leave the block."""
    together: tuple[tuple[str, ...], ...] = ()
    """Linear layers that enter regions with the same tensor, which nothing else there takes; each is called once."""
    draws: tuple[Draw | None, ...] = ()
    """In the order in which the block draws in training; None: drawn alike on every rank. Empty: it draws nothing, or
    it is not known how; then each rank draws for itself inside a region."""
    inner: tuple[InnerResult, ...] = ()
    """What it and modules inside return; those that return one tensor, which is whole, are left out."""
    unrun: tuple[str, ...] = ()
    """Modules with parameters that did not run when it was proved."""
    unread: tuple[str, ...] = ()
    """Parameters of the others that nothing read then."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of modules and parameters that hold weights, by relative name: why they are split as they are."""

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {
            "groups": [group.to_json() for group in self.groups],
            "shards": {name: shard_to_json(shard) for name, shard in self.shards.items()},
            "attributes": [[one.module, one.name, one.whole, one.part] for one in self.attributes],
            "inputs": [_slice_to_json(one) for one in self.inputs],
            "entering": [list(path) for path in self.entering],
            "outputs": [_slice_to_json(one) for one in self.outputs],
            "together": [list(names) for names in self.together],
            "draws": [None if one is None else _draw_to_json(one) for one in self.draws],
            "inner": [one.to_json() for one in self.inner],
            "unrun": list(self.unrun),
            "unread": list(self.unread),
            "reasons": dict(self.reasons),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BlockSplit:
        """Returns what `to_json` made."""
        return cls(
            groups=tuple(map(GroupSplit.from_json, value["groups"])),
            shards={name: shard_from_json(shard) for name, shard in value["shards"].items()},
            attributes=tuple(
                Attribute(module=module, name=name, whole=whole, part=part)
                for module, name, whole, part in value["attributes"]
            ),
            inputs=tuple(map(_slice_from_json, value["inputs"])),
            entering=tuple(tuple(path) for path in value["entering"]),
            outputs=tuple(map(_slice_from_json, value["outputs"])),
            together=tuple(map(tuple, value["together"])),
            draws=tuple(None if one is None else _draw_from_json(one) for one in value["draws"]),
            inner=tuple(map(InnerResult.from_json, value["inner"])),
            unrun=tuple(value["unrun"]),
            unread=tuple(value["unread"]),
            reasons=value["reasons"],
        )


def shard_to_json(shard: Shard) -> dict[str, Any]:
    """Returns a Shard as JSON values."""
    parts = [[list(run) for run in runs] for runs in shard.parts]
    return {"dim": shard.dim, "size": shard.size, "parts": parts, "summed": shard.summed}


def shard_from_json(value: Mapping[str, Any]) -> Shard:
    """Returns what `shard_to_json` made."""
    return Shard(value["dim"], value["size"], tuple(map(runs_from_json, value["parts"])), value["summed"])


def runs_from_json(value: Any) -> Runs:
    """Returns runs of indices from lists of lists."""
    return tuple((first, end) for first, end in value)


def _draw_to_json(one: Draw) -> dict[str, Any]:
    return {"dim": one.dim, "whole": one.whole, "parts": [[list(run) for run in runs] for runs in one.parts]}


def _draw_from_json(value: Mapping[str, Any]) -> Draw:
    return Draw(dim=value["dim"], whole=value["whole"], parts=tuple(map(runs_from_json, value["parts"])))


def _slice_to_json(one: TensorSlice) -> dict[str, Any]:
    parts = [[list(run) for run in runs] for runs in one.parts]
    return {"path": list(one.path), "dim": one.dim, "period": one.period, "parts": parts}


def _slice_from_json(value: Mapping[str, Any]) -> TensorSlice:
    return TensorSlice(
        path=tuple(value["path"]),
        dim=value["dim"],
        period=value["period"],
        parts=tuple(map(runs_from_json, value["parts"])),
    )


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

    def to_json(self) -> list[Any]:
        """Returns it as JSON values."""
        return [self.module, list(self.path), self.sums, self.folded, list(self.readers)]

    @classmethod
    def from_json(cls, value: list[Any]) -> Gathering:
        """Returns what `to_json` made."""
        module, path, sums, folded, readers = value
        return cls(module=module, path=tuple(path), sums=sums, folded=folded, readers=tuple(readers))


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

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {
            "hidden": list(self.hidden),
            "result": list(self.result),
            "dim": self.dim,
            "gathers": [one.to_json() for one in self.gathers],
            "begins": self.begins,
            "ends": self.ends,
            "inner": [one.to_json() for one in self.inner],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SequenceSplit:
        """Returns what `to_json` made."""
        return cls(
            hidden=tuple(value["hidden"]),
            result=tuple(value["result"]),
            dim=value["dim"],
            gathers=tuple(map(Gathering.from_json, value["gathers"])),
            begins=value["begins"],
            ends=value["ends"],
            inner=tuple(map(InnerResult.from_json, value["inner"])),
        )
