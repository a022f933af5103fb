"""in_parts(): what a job costs whose micro-batches are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fold3d.plan.costs import Exchanges, Profile
from fold3d.plan.job import Job
from fold3d.plan.memory.layer_bytes import LayerBytes


def in_parts(job: Job, size: int) -> Job:
    """Returns the job whose micro-batches run in parts of `size` samples, one after the other.

    A part of b samples takes a + c * b: seconds and bytes lie on the line through those of one sample and those of all
    (`Job.one_sample`, `Job.profile`). Kernels that are too small to fill a device take about as long with a few samples
    as with one, so between the two the line is on the safe side. Where one sample was not looked at, or times are
    shares of FLOPs, a is 0.

    Raises:
        ValueError: for a size that is not between 1 and the job's.
    """
    if job.samples is None or not 1 <= size <= job.samples:
        raise ValueError(f"parts of {size} samples of micro-batches of {job.samples}")
    if size == job.samples:
        return job
    parts = -(-job.samples // size)
    profile = _between(job.one_sample, job.profile, job.samples, size)
    return replace(job, micro_batches=parts * job.micro_batches, samples=size, profile=profile)


def _between(one: Profile | None, whole: Profile, samples: int, size: int) -> Profile:
    """Returns the costs of `size` samples."""
    share = _Sum(0.0, size / samples)
    line = share if one is None else _Sum(1 - (size - 1) / (samples - 1), (size - 1) / (samples - 1))
    one = whole if one is None else one
    times = line if one.measured and whole.measured else share
    halves = size > 1 and whole.halves_factor is not None
    return replace(
        whole,
        forward=times.seconds(one.forward, whole.forward),
        backward=times.seconds(one.backward, whole.backward),
        layers=line.layers(one.layers, whole.layers),
        activation_bytes=tuple(map(line.bytes, one.activation_bytes, whole.activation_bytes)),
        tp_forward=line.exchanges(one.tp_forward, whole.tp_forward),
        tp_backward=line.exchanges(one.tp_backward, whole.tp_backward),
        halves_factor=whole.halves_factor if halves else None,
        sub_micro_batches=min(whole.sub_micro_batches, size) if halves else 2,
        inside=tuple(
            replace(b, layers=line.layers(a.layers, b.layers), seconds=times.seconds(a.seconds, b.seconds))
            for a, b in zip(one.inside, whole.inside, strict=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Sum:
    """How much of what one sample takes and how much of what all take a part takes."""

    of_one: float
    of_whole: float

    def seconds(self, one: Sequence[float], whole: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.of_one * a + self.of_whole * b for a, b in zip(one, whole, strict=True))

    def bytes(self, one: int, whole: int) -> int:
        return round(self.of_one * one + self.of_whole * whole)

    def layers(self, one: Sequence[LayerBytes], whole: Sequence[LayerBytes]) -> tuple[LayerBytes, ...]:
        return tuple(
            LayerBytes(
                saved=self.bytes(a.saved, b.saved),
                outputs=self.bytes(a.outputs, b.outputs),
                forward=self.bytes(a.forward, b.forward),
                backward=self.bytes(a.backward, b.backward),
            )
            for a, b in zip(one, whole, strict=True)
        )

    def exchanges(self, one: Exchanges, whole: Exchanges) -> Exchanges:
        return tuple(
            tuple(replace(b, bytes=self.bytes(a.bytes, b.bytes)) for a, b in zip(*layers, strict=True))
            for layers in zip(one, whole, strict=True)
        )
