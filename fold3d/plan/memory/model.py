"""memory_model(): what csrc/core/memory is told of a layout, and what it says of a step's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d import _C
from fold3d.plan.job import Job
from fold3d.plan.layout import Layout
from fold3d.plan.strategy import Modes
from fold3d.topology import stage_of

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

    def text(self) -> str:
        """Returns what takes most, the largest first."""
        parts = sorted(zip(self.uses, USES, strict=True), reverse=True)
        return ", ".join(f"{name} {size / 1e6:,.0f} MB" for size, name in parts if size > 0.01 * self.bytes)


def memory_model(job: Job, layout: Layout, modes: Modes) -> _C.MemoryModel:
    """Returns the bytes of every chunk.

    Args:
        modes: per stage, the way of DP.sync of each bucket.
    """
    model = _C.MemoryModel()
    model.gradients_stay = job.dp > 1  # in buckets; with one replica autograd makes them and they go with the step
    ways = [iter(modes[stage]) for stage in range(job.pp)]
    chunks = []
    for number, activations in enumerate(layout.activations):
        stage = stage_of(number, job.pp)
        chunk = _C.ChunkBytes()
        chunk.weights = layout.parameter_bytes[number]
        buckets = layout.buckets[number] if layout.buckets else ()
        flat, trained = sum(bucket.bytes for bucket in buckets), layout.trainable_bytes[number]
        chunk.gradients = max(flat, trained) if job.dp > 1 else trained
        state = job.profile.optimizer_bytes * trained / flat if flat else 0.0  # per byte of a bucket
        chunk.optimizer = sum(
            round(state * bucket.bytes / (job.dp if next(ways[stage]) == "zero1" else 1)) for bucket in buckets
        )
        chunk.inputs = layout.activation_bytes[number - 1] if number else 0
        chunk.saved, chunk.forward, chunk.backward = activations.saved, activations.forward, activations.backward
        chunks.append(chunk)
    model.chunks = chunks
    return model


def peaks_of(curves: Sequence[_C.StageMemory]) -> tuple[StagePeak, ...]:
    """Returns the peak of each stage."""
    return tuple(
        StagePeak(bytes=curve.peak.device, uses=tuple(curve.peak.uses), pool=curve.most_pool) for curve in curves
    )
