"""Topology: which rank is which replica and stage. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Coordinates of one rank in the dp x pp grid; rank = dp_rank * pp + pp_rank."""

    dp: int
    pp: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.dp * self.pp:
            raise ValueError(f"rank {self.rank} is outside the {self.dp} x {self.pp} grid")

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.dp * self.pp

    @property
    def dp_rank(self) -> int:
        """Replica of this rank."""
        return self.rank // self.pp

    @property
    def pp_rank(self) -> int:
        """Stage of this rank."""
        return self.rank % self.pp

    def rank_of(self, dp_rank: int, pp_rank: int) -> int:
        """Returns the global rank of stage `pp_rank` in replica `dp_rank`."""
        return dp_rank * self.pp + pp_rank

    def describe(self, rank: int) -> str:
        """Returns how messages call a rank: "rank 3 (replica 1, stage 1)"."""
        return f"rank {rank} (replica {rank // self.pp}, stage {rank % self.pp})"

    def pipeline(self, dp_rank: int) -> list[int]:
        """Returns the global ranks of one replica in stage order."""
        return [self.rank_of(dp_rank, stage) for stage in range(self.pp)]

    def replicas(self, pp_rank: int) -> list[int]:
        """Returns the global ranks that hold stage `pp_rank`, in replica order."""
        return [self.rank_of(replica, pp_rank) for replica in range(self.dp)]

    def chunks(self, segments: int) -> list[int]:
        """Returns the chunks of this rank: segment * pp + stage for every segment."""
        return [segment * self.pp + self.pp_rank for segment in range(segments)]
