"""ShardingPlan: what each rank of a tensor-parallel group holds of a model, and what its blocks do differently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fold3d.sharding.shard import Shard
from fold3d.sharding.split import BlockSplit, SequenceSplit, as_json
from fold3d.sharding.vocabulary import Vocabulary

_Split = TypeVar("_Split")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """How a model is spread over `tp` ranks; the same on each. `fold3d.splitting.plan_sharding` makes it."""

    tp: int
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """Canonical parameter name -> how it is spread. Others are whole on every rank, with the same gradient."""
    blocks: Mapping[str, BlockSplit] = field(default_factory=dict)
    """Block's name -> what its forward does differently; blocks of one class share theirs."""
    notes: tuple[str, ...] = ()
    """What a user should know: where the plan differs from the model's own, for one."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Embedding and output head that are spread by entries; `shards` has their parameters."""

    sequence: Mapping[str, SequenceSplit] = field(default_factory=dict)
    """Block's name -> how it works on a part of the sequence; empty: every rank has all of it."""
    sequence_reason: str = ""
    """Why ranks have the whole sequence, where it was asked for that they do not."""

    def shard_of(self, name: str) -> Shard | None:
        """Returns how parameter `name` is spread; None: it is whole on every rank, with the same gradient."""
        return self.shards.get(name)

    def to_json(self) -> str:
        """Returns it as text; equal plans have the same."""
        classes, blocks = _classes(self.blocks)
        shared, sequence = _classes(self.sequence)
        value = {
            "tp": self.tp,
            "shards": self.shards,
            "classes": classes,
            "blocks": blocks,
            "notes": self.notes,
            "shared": shared,
            "sequence": sequence,
            "sequence_reason": self.sequence_reason,
            "vocabulary": self.vocabulary,
        }
        return json.dumps(as_json(value), separators=(",", ":"))

    @property
    def digest(self) -> str:
        """A hash of all of it, for ranks to compare."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()


def _classes(splits: Mapping[str, _Split]) -> tuple[list[_Split], dict[str, int]]:
    """Returns the different ones, and the number of each block's among them."""
    classes: list[_Split] = []
    for split in splits.values():
        if split not in classes:
            classes.append(split)
    return classes, {name: classes.index(split) for name, split in splits.items()}
