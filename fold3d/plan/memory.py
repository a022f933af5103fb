"""What csrc/core/memory says of a step's memory: peaks; even_curves(), of made-up work. Spared: what a plan does for
less of it, at the cost of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fold3d import _C
from fold3d.config import text_of_bytes
from fold3d.offload import Offload
from fold3d.plan.cluster_model import ClusterCosts, Work, cluster_model
from fold3d.recompute import Choice, Recompute
from fold3d.topology import of_stage


@dataclass(frozen=True, slots=True)
class Spared:
    """What is computed again instead of kept, and what leaves the device between forward and backward: the values of
    the knobs `recompute` and `offload`."""

    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)

    @staticmethod
    def of(settings: tuple[tuple[str, str], ...]) -> Spared:
        """Returns what the settings of a strategy say. Raises: ValueError for text that is no value."""
        texts = dict(settings)
        return Spared(Recompute.read(texts.get("recompute", "none")), Offload.read(texts.get("offload", "none")))

    def into(self, settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Returns the settings with this in place of what they said."""
        mine = {"recompute": str(self.recompute), "offload": str(self.offload)}
        return tuple((name, mine.get(name, text)) for name, text in settings)

    @property
    def nothing(self) -> bool:
        """Whether all is kept on the device."""
        return self.recompute.nothing and self.offload.nothing

    def offloaded(self, chunks: int) -> list[bool]:
        """Returns, of every chunk, whether its stashes leave the device, of the share of micro-batches that `offload`
        names; empty where none does.

        Raises: ConfigError as Recompute.of_chunks.
        """
        if self.offload.what == "activations":
            return [True] * chunks
        if self.offload.what != "boundaries":
            return []
        moves = [keeps_boundaries(choice) for choice in self.recompute.of_chunks(chunks)]
        return moves if any(moves) else []

    def __str__(self) -> str:
        parts = {"recompute": str(self.recompute), "offload": str(self.offload)}
        return ", ".join(f'{name}="{text}"' for name, text in parts.items() if text != "none")


NOTHING = Spared()


def keeps_boundaries(choice: Choice) -> bool:
    """Returns whether a chunk keeps nothing but what it, or each of its blocks, was given."""
    return choice.full or choice.every == 1


StageMemory = _C.StageMemory
USES: tuple[str, ...] = tuple(_C.memory_use_names())
"""What bytes are for, in the order in which they are stacked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePeak:
    """The most that a rank of a stage has on its device in a step."""

    bytes: int
    uses: tuple[int, ...]
    """By USES, at that moment; together `bytes`."""
    pool: int = 0
    """The most in the host's pool."""
    host: int = 0
    """In host memory all the time, beside the pool: the optimizer's state, if it is there."""

    def text(self) -> str:
        """Returns what takes most, the largest first."""
        parts = sorted(zip(self.uses, USES, strict=True), reverse=True)
        return ", ".join(f"{name} {text_of_bytes(size)}" for size, name in parts if size > 0.01 * self.bytes)


def even_curves(
    schedule: _C.Schedule, work: Work, cluster: ClusterCosts, saved: int, *, dp_sync: str, versions: int = 1
) -> list[_C.StageMemory]:
    """Returns the memory of a step of made-up work: weights, gradients and two moments are equally large.

    Args:
        work: from Work.even.
        saved: bytes that a rank keeps of a micro-batch, all its segments together.
        dp_sync: with "zero1" each replica keeps its share of the moments only.
        versions: of the weights.
    """
    chunks = []
    shares = _even_shares(work, schedule.pp, saved)
    for number, (kept, gradients) in enumerate(zip(shares, work.gradient_bytes, strict=True)):
        chunks.append(
            _C.ChunkBytes(
                weights=gradients * versions,
                gradients=gradients * (1 + cluster.gradient_delay),
                optimizer=2 * gradients // (cluster.dp if dp_sync == "zero1" else 1),
                inputs=work.activation_bytes[number - 1] if number else 0,
                saved=kept,
                forward=kept,
                backward=kept,
            )
        )
    step = _C.simulate_step(
        schedule, cluster_model(work, cluster, pp=schedule.pp, dp_sync=dp_sync), breakdown=False, spans=True
    )
    stay = cluster.dp > 1 or cluster.gradient_delay > 0
    return _C.memory_curves(schedule, _C.MemoryModel(chunks, gradients_stay=stay), step)


def even_stashes(work: Work, pp: int, saved: int, recompute: Sequence[bool]) -> tuple[int, ...]:
    """Returns Work.stash_bytes of made-up work: the inputs of chunks, and what those keep that do not recompute.

    Args:
        work, saved: as in `even_curves`.
        recompute: of every chunk whether it keeps no graph.
    """
    inputs = [0, *work.activation_bytes[:-1]]
    shares = _even_shares(work, pp, saved)
    return tuple(i + (0 if again else kept) for i, kept, again in zip(inputs, shares, recompute, strict=True))


def _even_shares(work: Work, pp: int, saved: int) -> list[int]:
    mine = sum(of_stage(work.layers, 0, pp))
    return [saved * layers // mine for layers in work.layers]


def peaks_of(curves: Sequence[_C.StageMemory]) -> tuple[StagePeak, ...]:
    """Returns the peak of each stage."""
    return tuple(
        StagePeak(bytes=curve.peak.device, uses=tuple(curve.peak.uses), pool=curve.most_pool, host=curve.host)
        for curve in curves
    )
