"""Topology: which rank is where in the mesh of data, pipeline and tensor parallelism. Pure arithmetic; nothing else in
the package divides by pp or tp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LOOP, V = "loop", "v"
"""Styles: on which stage a chunk lives, by the names of torch.distributed.pipelining. LOOP: every segment runs from
stage 0 to the last one. V: every second segment runs back, so that neighbouring segments meet on one stage."""


def stage_of(chunk: int, pp: int, style: str = LOOP) -> int:
    """Returns the stage that model chunk `chunk` lives on."""
    segment, place = divmod(chunk, pp)
    return pp - 1 - place if style == V and segment % 2 == 1 else place


def segment_of(chunk: int, pp: int) -> int:
    """Returns the segment that model chunk `chunk` is part of."""
    return chunk // pp


def num_segments(num_chunks: int, pp: int) -> int:
    """Returns how many segments a model of `num_chunks` chunks has."""
    return num_chunks // pp


def chunks_of(stage: int, num_chunks: int, pp: int, style: str = LOOP) -> Sequence[int]:
    """Returns the model chunks of one stage, ascending: one of every segment."""
    if style == LOOP:
        return range(stage, num_chunks, pp)
    return [chunk for chunk in range(num_chunks) if stage_of(chunk, pp, style) == stage]


def of_stage(per_chunk: Sequence[T], stage: int, pp: int, style: str = LOOP) -> Sequence[T]:
    """Returns the entries of one stage's chunks, of a sequence with one for each chunk of the model."""
    if style == LOOP:
        return per_chunk[stage::pp]
    return [per_chunk[chunk] for chunk in chunks_of(stage, len(per_chunk), pp, style)]


class Coordinates(NamedTuple):
    """Place of a rank on each axis, from the outermost in: the ranks of a tensor-parallel group are neighbours."""

    dp: int
    pp: int
    tp: int


def coordinates(rank: int, pp: int, tp: int = 1) -> Coordinates:
    """Returns where a global rank is on each axis: rank = (dp * pp_size + pp) * tp_size + tp."""
    outer, tp_rank = divmod(rank, tp)
    return Coordinates(*divmod(outer, pp), tp_rank)


@dataclass(frozen=True, order=True, slots=True)
class Submesh:
    """Part of one replica, a box over the axes pp and tp: the places that hold a copy of the same parameter, so that
    the gradients of the copies are summed over it before the replicas are."""

    pp: tuple[int, ...]
    """Stages, ascending."""
    tp: tuple[int, ...] = (0,)
    """Places on the axis tp, ascending."""

    def __post_init__(self) -> None:
        for axis, places in (("pp", self.pp), ("tp", self.tp)):
            if not places or list(places) != sorted(set(places)) or places[0] < 0:
                raise ValueError(f"{axis}={places!r}: a submesh has at least one place on each axis, ascending")

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one copy."""
        return len(self.pp) * len(self.tp) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Place of one rank in the dp x pp x tp mesh; rank = (dp_rank * pp + pp_rank) * tp + tp_rank."""

    dp: int
    pp: int
    rank: int
    tp: int = 1
    style: str = LOOP
    """LOOP or V: on which stages the chunks live."""
    segments: int | None = None
    """Of the model, where `style` is V; else nobody asks."""

    def __post_init__(self) -> None:
        if min(self.dp, self.pp, self.tp) < 1 or not 0 <= self.rank < self.world:
            grid = f"{self.dp} x {self.pp}" + (f" x {self.tp}" if self.tp != 1 else "")
            raise ValueError(f"rank {self.rank} is outside the {grid} grid")

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Returns where a rank is on each axis."""
        return coordinates(rank, self.pp, self.tp)

    @property
    def dp_rank(self) -> int:
        """Replica of this rank."""
        return self.coordinates(self.rank).dp

    @property
    def pp_rank(self) -> int:
        """Stage of this rank."""
        return self.coordinates(self.rank).pp

    @property
    def tp_rank(self) -> int:
        """Place of this rank among those that share its layers' weights."""
        return self.coordinates(self.rank).tp

    @property
    def loss_stage(self) -> int:
        """The stage that has the last chunk, and with it the loss."""
        return stage_of((self.segments or 1) * self.pp - 1, self.pp, self.style)

    @property
    def has_loss(self) -> bool:
        """Whether this rank's stage has the last chunk, and with it the loss."""
        return self.pp_rank == self.loss_stage

    def rank_of(self, dp_rank: int, pp_rank: int, tp_rank: int | None = None) -> int:
        """Returns the global rank of stage `pp_rank` in replica `dp_rank`, at this rank's place on the axis tp if no
        other is named."""
        return (dp_rank * self.pp + pp_rank) * self.tp + (self.tp_rank if tp_rank is None else tp_rank)

    def ranks_of(self, submesh: Submesh, dp_rank: int) -> list[int]:
        """Returns the global ranks of part of replica `dp_rank`, ascending."""
        return [self.rank_of(dp_rank, stage, tp) for stage in submesh.pp for tp in submesh.tp]

    def source_of(self, submesh: Submesh) -> int:
        """Returns the global rank in this rank's replica whose copy counts where copies could differ: the first."""
        return self.rank_of(self.dp_rank, submesh.pp[0], submesh.tp[0])

    def holds(self, submesh: Submesh) -> bool:
        """Returns whether this rank lies in the part of its replica."""
        return self.pp_rank in submesh.pp and self.tp_rank in submesh.tp

    def describe(self, rank: int) -> str:
        """Returns how messages call a rank: "rank 3 (replica 1, stage 1)"."""
        at = self.coordinates(rank)
        shard = f", shard {at.tp}" if self.tp > 1 else ""
        return f"rank {rank} (replica {at.dp}, stage {at.pp}{shard})"

    def pipeline(self, dp_rank: int, tp_rank: int | None = None) -> list[int]:
        """Returns the global ranks of one replica in stage order, at this rank's place on the axis tp if no other is
        named."""
        return [self.rank_of(dp_rank, stage, tp_rank) for stage in range(self.pp)]

    def replicas(self, pp_rank: int, tp_rank: int | None = None) -> list[int]:
        """Returns the global ranks that hold stage `pp_rank`, in replica order, at this rank's place on the axis tp if
        no other is named."""
        return [self.rank_of(replica, pp_rank, tp_rank) for replica in range(self.dp)]

    def shards(self, dp_rank: int, pp_rank: int) -> list[int]:
        """Returns the global ranks that share the weights of one stage of one replica: a tensor-parallel group."""
        return [self.rank_of(dp_rank, pp_rank, tp_rank) for tp_rank in range(self.tp)]

    def replica(self, dp_rank: int) -> list[int]:
        """Returns all global ranks of one replica, ascending: stage by stage the shards of each."""
        return [rank for stage in range(self.pp) for rank in self.shards(dp_rank, stage)]

    @property
    def next_stage(self) -> int:
        """The stage that activations go to, round the ring."""
        return (self.pp_rank + 1) % self.pp

    @property
    def next_shard(self) -> int:
        """The place on the axis tp that TP.sync is sent to, round the ring."""
        return (self.tp_rank + 1) % self.tp

    @property
    def previous_stage(self) -> int:
        """The stage that activations come from, round the ring."""
        return (self.pp_rank - 1) % self.pp

    def place_of(self, micro_batch: int) -> int:
        """Returns which of the pp places a micro-batch has in a pipeline that does not run empty."""
        return micro_batch % self.pp

    def chunks(self, segments: int) -> Sequence[int]:
        """Returns the chunks of this rank."""
        return chunks_of(self.pp_rank, segments * self.pp, self.pp, self.style)
