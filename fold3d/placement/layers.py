"""Which parameters each layer of a chunk needs: the one place that reads it off the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d.topology import LOOP, chunks_of, stage_of
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


def layers_of(trace: Trace, ranges: Ranges, chunk: int) -> list[Layer]:
    """Returns the layers of a chunk in forward order, each with all names of parameters that it needs.

    The first layer also has what every chunk needs (Trace.shared), and what no forward has read of all that lies in the
    chunk.
    """
    lo, hi = ranges[chunk]
    blocks, unread = len(trace.blocks), set(trace.unread)
    needed = [
        (block, [name for name in trace.uses[block] if name not in unread]) for block in range(lo, hi + (hi == blocks))
    ]
    if lo == 0:
        inside = f"{trace.blocks[0]}."
        needed.insert(0, (PROLOGUE, [name for name in needed[0][1] if not name.startswith(inside)]))
    needed[0] = (needed[0][0], [*trace.shared, *unread_in(trace, ranges, chunk), *needed[0][1]])
    return [Layer(block, tuple(names)) for block, names in needed]


def unread_in(trace: Trace, ranges: Ranges, chunk: int) -> list[str]:
    """Returns the names of the parameters of a chunk that no forward has read."""
    lo, hi = ranges[chunk]
    unread = set(trace.unread)
    return [name for uses in trace.uses[lo : hi + (hi == len(trace.blocks))] for name in uses if name in unread]


def chunk_parameters(names: Sequence[str], trace: Trace, ranges: Ranges, chunk: int) -> list[str]:
    """Returns those of `names`, all names of the model's parameters, that a chunk needs; of a tied parameter all."""
    needed = {name for layer in layers_of(trace, ranges, chunk) for name in layer.parameters}
    for group in trace.tied:
        if needed.intersection(group):
            needed.update(group)
    return [name for name in names if name in needed]


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
    seen: list[set[str]] = [set() for _ in range(pp)]
    chunks: list[list[Layer]] = []
    for chunk in range(len(ranges)):
        mine = seen[stage_of(chunk, pp, style)]
        layers: list[Layer] = []
        for layer in layers_of(trace, ranges, chunk):
            parameters = [*layer.parameters]
            if not layers and chunk < pp:
                of_stage = chunks_of(chunk, len(ranges), pp, style)  # which the first segment has on stage `chunk`
                parameters += [name for other in of_stage for name in unread_in(trace, ranges, other)]
            names = dict.fromkeys(canonical.get(name, name) for name in parameters)
            fresh = [name for name in names if name not in mine]
            mine.update(fresh)
            layers.append(Layer(layer.block, tuple(fresh)))
        chunks.append(layers)
    return chunks
