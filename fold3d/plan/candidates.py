"""The settings that the search tries: segments, schedules, bucket sizes, ways of DP.sync; and the paper's heuristic."""

from __future__ import annotations

from fold3d import schedule as schedules
from fold3d.plan.job import Fixed, Job
from fold3d.plan.layout import Layout, Ranges, layout_of, places
from fold3d.plan.trial import Modes, Order
from fold3d.topology import num_segments

MOST_SEGMENTS = 32
WHOLE_CHUNK = 1 << 50
"""bucket_bytes that makes every chunk one bucket."""
_BUCKET_BYTES = (0, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, WHOLE_CHUNK)


def segment_counts(job: Job, fixed: Fixed) -> list[int]:
    """Returns the numbers of segments to try, ascending: all up to 12, then every fourth."""
    if fixed.ranges is not None:
        return [num_segments(len(fixed.ranges), job.pp)]
    if fixed.segments is not None:
        return [fixed.segments]
    most = max(1, min(MOST_SEGMENTS, num_segments(len(places(job.trace)), job.pp)))
    if fixed.schedule is not None and not fixed.schedule.endswith(".csv") and not _folds(fixed.schedule):
        most = 1
    return [n for n in range(1, most + 1) if n <= 12 or n % 4 == 0 or n == most]


def _folds(name: str) -> bool:
    return any(info.uses_segments for info in schedules.registry() if info.name == name)


def orders(job: Job, fixed: Fixed, segments: int) -> list[Order]:
    """Returns the schedules to try with so many segments; the plainest first."""
    if fixed.schedule is not None and fixed.schedule != "fold":
        return [Order(fixed.schedule)]
    if fixed.group_size is not None:
        return [Order("fold", fixed.group_size)]
    stride = 2 if job.micro_batches <= 8 * job.pp else 4
    sizes = [job.pp]
    while sizes[-1] * stride < job.micro_batches:
        sizes.append(sizes[-1] * stride)
    sizes = sorted({min(size, job.micro_batches) for size in (*sizes, job.micro_batches)})
    folds = [Order("fold", size) for size in sizes]
    if fixed.schedule == "fold":
        return folds
    if segments == 1:
        return [Order("1f1b"), Order("gpipe")]
    # fold with N = pp is the interleaved schedule.
    return [Order("aiao"), Order("interleaved"), *(fold for fold in folds if fold.group_size != job.pp)]


def layouts(job: Job, fixed: Fixed, ranges: Ranges) -> list[Layout]:
    """Returns the cut with every bucket size that makes a difference, from small buckets to large ones."""
    sizes = _BUCKET_BYTES if fixed.bucket_bytes is None else (fixed.bucket_bytes,)
    found: list[Layout] = []
    for size in sizes:
        layout = layout_of(job, ranges, size)
        if not found or layout.buckets != found[-1].buckets:
            found.append(layout)
    return found


def uniform_modes(job: Job, layout: Layout, mode: str) -> Modes:
    """Returns the same mode for all buckets."""
    return tuple((mode,) * len(layout.of_stage(stage, job.pp)) for stage in range(job.pp))


def mixed_modes(job: Job, layout: Layout, order: list[list[int]], early: int) -> Modes:
    """Returns "early" for the first `early` gathers of each stage's `order`, "zero1" for all others."""
    modes = []
    for stage in range(job.pp):
        first = set(order[stage][:early])
        modes.append(tuple("early" if n in first else "zero1" for n in range(len(layout.of_stage(stage, job.pp)))))
    return tuple(modes)


def heuristic_segments(job: Job, counts: list[int]) -> int:
    """Returns the number of segments that Fold3D chooses (section IV): the most with which PP.sync and DP.sync together
    take no longer than the computing that hides them."""
    profile = job.profile
    compute = (sum(profile.forward) + sum(profile.backward)) / job.pp * job.micro_batches
    gradients = sum(profile.gradient_bytes.values()) / job.pp
    dp_sync = 2 * (job.dp - 1) / job.dp * gradients / job.network.dp_bandwidth
    message = max(profile.activation_bytes) / job.network.pp_bandwidth + job.network.pp_latency
    best = counts[0]
    for segments in counts:
        pp_sync = (2 * segments - 1) * job.micro_batches * message if job.pp > 1 else 0.0
        if dp_sync + pp_sync > compute:
            break
        best = segments
    return best
