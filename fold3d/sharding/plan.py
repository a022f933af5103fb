"""ShardingPlan: what each rank of a tensor-parallel group holds of a model, and what its blocks do differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fold3d.sharding.shard import Shard
from fold3d.sharding.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """How a model is spread over `tp` ranks; the same on each."""

    tp: int
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """Canonical parameter name -> how it is spread. Others are whole on every rank, with the same gradient."""

    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Embedding and output head that are spread by entries; `shards` has their parameters."""

    def shard_of(self, name: str) -> Shard | None:
        """Returns how parameter `name` is spread; None: it is whole on every rank, with the same gradient."""
        return self.shards.get(name)
