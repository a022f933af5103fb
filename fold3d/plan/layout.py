"""Layout: what every chunk and bucket costs when the model is cut in a given way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fold3d._C import partition
from fold3d.errors import ConfigError
from fold3d.placement.buckets import cut_buckets
from fold3d.placement.layers import chunk_layers, layers_of
from fold3d.placement.recomputed_blocks import recomputed_places
from fold3d.plan.cluster_model import BucketCost, Work
from fold3d.plan.job import Job
from fold3d.plan.memory.layer_bytes import Activations, LayerBytes, activations_of, with_head_done
from fold3d.plan.memory.spared import NOTHING, Spared
from fold3d.plan.strategy import Ranges
from fold3d.topology import num_segments, of_stage
from fold3d.trace import Trace


@dataclass(frozen=True, slots=True)
class Shares:
    """Times that segments shall have, relative to each other."""

    first: float = 1.0
    """Of the first segment. Less than 1 makes the reduce-scatters and gathers short that the next step waits for; more
    than 1 lets it hide more gathers."""
    last: float = 1.0
    """Of the last segment. Less than 1 lets the first reduce-scatters begin earlier."""
    grow: bool = False
    """The others grow evenly from the first to the last; else they have 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Work):
    """A cut of the model, with what its chunks cost by the job's profile."""

    ranges: Ranges
    bucket_bytes: int
    activations: tuple[Activations, ...]
    parted: Activations | None
    """Those of the last chunk where its head's backward is in its forward; None: that cannot be parted from the body's,
    because they share parameters."""
    head_gradient_bytes: int
    """Of the parameters that only the last chunk's head reads."""
    kept: tuple[int, ...]
    """Bytes that a chunk keeps of a micro-batch beside its inputs if its forward runs again as a whole."""
    spared: Spared
    """What is computed again, and what leaves the device."""
    parameter_bytes: tuple[int, ...]
    trainable_bytes: tuple[int, ...]
    """Of `parameter_bytes` those that are trained."""
    largest_gradient: tuple[int, ...]
    """Bytes of the largest parameter's."""

    def of_stage(self, stage: int, pp: int) -> list[BucketCost]:
        """Returns the stage's buckets in forward order: number 0, 1, ..."""
        return [bucket for chunk in of_stage(self.buckets, stage, pp, self.style) for bucket in chunk]


def layout_of(job: Job, ranges: Ranges, bucket_bytes: int, spared: Spared = NOTHING) -> Layout:
    """Returns what the chunks of `ranges` cost, with buckets of at least `bucket_bytes` (cut_buckets).

    Raises: ConfigError when `spared` is said of another number of chunks.
    """
    return layouts_of(job, ranges, (bucket_bytes,), spared)[0]


def layouts_of(job: Job, ranges: Ranges, sizes_of_buckets: Sequence[int], spared: Spared = NOTHING) -> list[Layout]:
    """Returns `layout_of` for each size of buckets: nothing but these differ.

    Blocks that recompute each by itself are part of their chunk's backward; chunks that recompute as a whole cost what
    they do without: their RECOMPUTE is an action of its own.

    Raises: ConfigError when `spared` is said of another number of chunks.
    """
    profile = job.profile
    places_again = recomputed_places([end - first for first, end in ranges], job.pp, spared.recompute, job.style)
    again = [{first + place for place in places} for (first, _), places in zip(ranges, places_again, strict=True)]
    forward, backward, weights, trained, largest, update, timed = [], [], [], [], [], [], []
    needs: list[list[LayerBytes]] = []
    sums: list[int] = []  # of TP.sync
    forward_tp: list[float] = []
    backward_tp: list[float] = []
    for chunk, layers in enumerate(chunk_layers(job.trace, ranges, job.pp, job.style)):
        choice = spared.recompute.of_chunks(len(ranges))[chunk]
        costs = [profile.layer(layer.block + 1, layer.block in again[chunk], choice.patterns) for layer in layers]
        times = [(cost.forward, cost.backward) for cost in costs]
        sizes = [sum(profile.gradient_bytes[name] for name in layer.parameters) for layer in layers]
        forward.append(sum(time for time, _ in times))
        backward.append(sum(time for _, time in times))
        for waits, known in ((forward_tp, profile.exposed_forward), (backward_tp, profile.exposed_backward)):
            waits.append(sum(known[layer.block + 1] for layer in layers) if known else 0.0)
        needs.append([cost.bytes for cost in costs])
        sums.append(sum(cost.sums for cost in costs))
        names = [name for layer in layers for name in layer.parameters]
        weights.append(sum(profile.parameter_bytes[name] for name in names))
        trained.append(sum(profile.parameter_bytes[name] for name in names if profile.gradient_bytes[name]))
        largest.append(max((profile.gradient_bytes[name] for name in names), default=0))
        update.append(sum(sizes) * profile.update_seconds)
        timed.append((times, sizes))
    sent = [*(profile.activation_bytes[end - 1] for _, end in ranges[:-1]), 0]
    activations = [activations_of(layers, arriving) for layers, arriving in zip(needs, sent, strict=True)]
    parts = _head_parts(job.trace, ranges)
    parted = with_head_done(needs[-1], profile.activation_bytes[-1]) if parts else None
    of_head = [name for name in layers[-1].parameters if profile.gradient_bytes[name]]
    arrives = [0, *(profile.activation_bytes[end - 1] for _, end in ranges[:-1])]
    whole = spared.recompute.without_graph(len(ranges))
    moves = spared.offloaded(len(ranges))
    stashed = [
        into + (held if none else chunk.saved)
        for into, held, none, chunk in zip(
            arrives, sums, whole, [*activations[:-1], parted or activations[-1]], strict=True
        )
    ]
    first = Layout(
        ranges=ranges,
        style=job.style,
        bucket_bytes=sizes_of_buckets[0],
        forward=tuple(forward),
        backward=tuple(backward),
        forward_tp=tuple(forward_tp),
        backward_tp=tuple(backward_tp),
        activation_bytes=tuple(profile.activation_bytes[end - 1] for _, end in ranges),
        stash_bytes=tuple(stashed) if moves else (),
        activations=tuple(activations),
        parted=parted,
        head_gradient_bytes=sum(profile.parameter_bytes[name] for name in of_head),
        head=profile.backward[-1] if parts else 0.0,
        kept=tuple(sums),
        spared=spared,
        parameter_bytes=tuple(weights),
        trainable_bytes=tuple(trained),
        largest_gradient=tuple(largest),
        update=tuple(update),
        buckets=_buckets(timed, sizes_of_buckets[0]),
    )
    return [first, *(replace(first, bucket_bytes=size, buckets=_buckets(timed, size)) for size in sizes_of_buckets[1:])]


def _buckets(
    chunks: Sequence[tuple[Sequence[tuple[float, float]], Sequence[int]]], bucket_bytes: int
) -> tuple[tuple[BucketCost, ...], ...]:
    """Returns the buckets of chunks, given their layers' times of a forward and a backward and bytes of gradients."""
    return tuple(
        tuple(
            BucketCost(
                sum(time for time, _ in times[first:end]),
                sum(time for _, time in times[first:end]),
                sum(sizes[first:end]),
            )
            for first, end in cut_buckets(sizes, bucket_bytes)
        )
        for times, sizes in chunks
    )


def _head_parts(trace: Trace, ranges: Ranges) -> bool:
    """Whether what follows the last block shares no parameter with the rest of its chunk (see
    csrc/runtime/executor/head_backward.h)."""
    canonical = trace.canonical()
    *body, head = layers_of(trace, ranges, len(ranges) - 1)
    of_body = {canonical.get(name, name) for layer in body for name in layer.parameters}
    return of_body.isdisjoint(canonical.get(name, name) for name in head.parameters)


def places(trace: Trace) -> list[int]:
    """Returns the blocks at which a chunk may start."""
    return [block for block, reason in enumerate(trace.borders) if not reason or block == 0]


def cut(job: Job, segments: int, shares: Shares = Shares()) -> Ranges:
    """Returns the blocks of every chunk: segments by `shares`, each cut into stages of about equal time.

    Stages of one segment work side by side, so a difference between them is idle time; a difference between segments is
    not.

    Args:
        segments: parts of the model; there must be pp * segments places to cut.
    Raises: ConfigError if there are fewer places.
    """
    starts = places(job.trace)
    total, pp = len(job.trace.blocks), job.pp
    if segments * pp > len(starts):
        why = next((f" ({reason})" for reason in job.trace.borders if reason), "")
        raise ConfigError(
            f"segments={segments} times pp={pp} chunks are asked for, but the model can be cut at {len(starts) - 1} "
            f"places only{why}; lower segments or pp, or name smaller blocks with the setting `blocks`"
        )
    ends = [*starts[1:], total]
    both = [x + y for x, y in zip(job.profile.forward, job.profile.backward, strict=True)]
    blocks = both[1:-1]
    blocks[0] += both[0]
    blocks[-1] += both[-1]
    costs = [sum(blocks[first:end]) for first, end in zip(starts, ends, strict=True)]
    firsts: list[int] = []
    for first, end in pairwise(_segment_borders(costs, pp, segments, shares)):
        firsts += [first + offset for offset in partition(costs[first:end], pp)]
    begins = [starts[first] for first in firsts]
    return tuple(zip(begins, [*begins[1:], total], strict=True))


def _segment_borders(costs: list[float], pp: int, segments: int, shares: Shares) -> list[int]:
    """Returns the first unit of every segment, and the number of units. Whole groups of pp units, so that a segment of
    equal blocks can be cut evenly; what is left over goes to the last group."""
    count = num_segments(len(costs), pp)
    groups = [sum(costs[pp * k : pp * (k + 1)]) for k in range(count)]
    groups[-1] += sum(costs[pp * count :])
    if shares.grow:
        return [pp * begin for begin in _growing(groups, segments, shares)] + [len(costs)]
    # With two segments one share tells the sizes of both.
    first_share, last_share = shares.first, shares.last if segments > 2 else 1.0
    inner = segments - (first_share != 1) - (last_share != 1)
    if inner < 1:
        return [pp * first for first in partition(groups, segments)] + [len(costs)]
    average = sum(groups) / (inner + (first_share if first_share != 1 else 0) + (last_share if last_share != 1 else 0))
    head = _take(groups, first_share * average, count - segments + 1) if first_share != 1 else 0
    tail = _take(groups[::-1], last_share * average, count - head - inner) if last_share != 1 else 0
    rest = partition(groups[head : count - tail], inner)
    begins = [0] * (head > 0) + [head + first for first in rest] + [count - tail] * (tail > 0)
    return [pp * begin for begin in begins] + [len(costs)]


def _growing(groups: list[float], segments: int, shares: Shares) -> list[int]:
    """Returns the first group of every segment, where the times are nearest to growing evenly."""
    step = (shares.last - shares.first) / max(1, segments - 1)
    wanted = [shares.first + step * k for k in range(segments)]
    scale = sum(groups) / sum(wanted)
    begins, passed, due = [0], 0.0, 0.0
    for k in range(1, segments):
        due += scale * wanted[k - 1]
        begin = begins[-1] + 1
        passed += groups[begin - 1]
        while begin < len(groups) - (segments - k) and abs(passed + groups[begin] - due) <= abs(passed - due):
            passed += groups[begin]
            begin += 1
        begins.append(begin)
    return begins


def _take(groups: list[float], time: float, most: int) -> int:
    """Returns how many groups come nearest to `time` without more than that; at least 1."""
    taken = 1
    while taken < most and sum(groups[: taken + 1]) <= time * 1.001:
        taken += 1
    return taken
