"""SequenceSplit: how a block works on a part of the sequence outside of its regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fold3d.sharding.split import InnerResult, Path


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
