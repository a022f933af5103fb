"""Which parameters each layer of a chunk needs, as the recording says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fold3d import _C
from fold3d.topology import LOOP
from fold3d.trace import Trace

PROLOGUE = -1
"""Layer.block of what runs before the first block."""

Ranges = Sequence[tuple[int, int]]
"""[first, end) block of every chunk of the whole model."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What runs in one piece within a chunk: a block with what runs right before it, the prologue or the epilogue."""

    block: int
    """Index into Trace.blocks; PROLOGUE; or len(Trace.blocks) for the epilogue."""
    parameters: tuple[str, ...]


def layer_reads(trace: Trace, number: Mapping[str, int]) -> _C.LayerReads:
    """Returns which parameters each layer reads, for csrc/core/plan/layer_reads.h, which knows what follows for chunks.

    Args:
        number: of every parameter, by canonical name.
    """
    canonical, unread, inside = trace.canonical(), set(trace.unread), f"{trace.blocks[0]}."

    def numbered(names: Iterable[str]) -> list[int]:
        return list(dict.fromkeys(number[canonical.get(name, name)] for name in names))

    reads = [[name for name in uses if name not in unread] for uses in trace.uses]
    return _C.LayerReads(
        [numbered(names) for names in reads],
        [numbered(name for name in uses if name in unread) for uses in trace.uses],
        numbered(name for name in reads[0] if not name.startswith(inside)),
        numbered(trace.shared),
    )


def unread_in(trace: Trace, ranges: Ranges, chunk: int) -> list[str]:
    """Returns the names of the parameters of a chunk that no forward has read."""
    unread = set(trace.unread)
    return [name for name in _uses_in(trace, ranges, chunk) if name in unread]


def chunk_parameters(names: Sequence[str], trace: Trace, ranges: Ranges, chunk: int) -> list[str]:
    """Returns those of `names`, all names of the model's parameters, that a chunk needs; of a tied parameter all.

    What every chunk needs (Trace.shared) is among them, and what no forward has read of all that lies in the chunk.
    """
    needed = {*trace.shared, *_uses_in(trace, ranges, chunk)}
    for group in trace.tied:
        if needed.intersection(group):
            needed.update(group)
    return [name for name in names if name in needed]


def _uses_in(trace: Trace, ranges: Ranges, chunk: int) -> list[str]:
    lo, hi = ranges[chunk]
    return [name for uses in trace.uses[lo : hi + (hi == len(trace.blocks))] for name in uses]


def chunk_layers(trace: Trace, ranges: Ranges, pp: int, style: str = LOOP) -> list[list[Layer]]:
    """Returns the layers of every chunk in forward order, with the parameters whose gradients they complete.

    These are canonical names, each in the first layer of its stage that needs it: its gradient is complete when that
    layer's last backward is. Frozen parameters, too. A tied parameter that two stages need is on both. What no forward
    has read is in the first layer of its stage: any of the stage's layers may read it one day.

    Args:
        pp: stages.
        style: on which of them the chunks live.
    """
    trace.check_ranges(list(ranges))
    canonical = trace.canonical()
    used = (name for names in (trace.shared, *trace.uses) for name in names)
    names = list(dict.fromkeys(canonical.get(name, name) for name in used))
    reads = layer_reads(trace, {name: number for number, name in enumerate(names)})
    return [
        [Layer(number - 1, tuple(names[one] for one in parameters)) for number, parameters in layers]
        for layers in reads.completed(list(ranges), pp, style)
    ]
