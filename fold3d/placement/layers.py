"""chunk_layers(): the layers of every chunk, with the parameters whose gradients they complete; buckets are made of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d.trace import Trace

PROLOGUE = -1
"""Layer.block of what runs before the first block."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What runs in one piece within a chunk: a block with what runs right before it, the prologue or the epilogue."""

    block: int
    """Index into Trace.blocks; PROLOGUE; or len(Trace.blocks) for the epilogue."""
    parameters: tuple[str, ...]
    """Canonical names, each in the first layer of its stage that needs it: its gradient is complete when that layer's
    last backward is. Frozen parameters, too."""


def chunk_layers(trace: Trace, ranges: Sequence[tuple[int, int]], pp: int) -> list[list[Layer]]:
    """Returns the layers of every chunk in forward order.

    Parameters that every chunk needs (Trace.shared) are in the first layer of their stage. A tied parameter that two
    stages need is on both.

    Args:
        ranges: [first, end) block of every chunk of the whole model.
        pp: stages; chunk v is on stage v % pp.
    """
    trace.check_ranges(list(ranges))
    canonical = trace.canonical()
    seen: list[set[str]] = [set() for _ in range(pp)]
    chunks: list[list[Layer]] = []
    for chunk, (lo, hi) in enumerate(ranges):
        mine = seen[chunk % pp]
        needed: list[tuple[int, Sequence[str]]] = []
        if lo == 0:
            inside = f"{trace.blocks[0]}."
            needed.append((PROLOGUE, [name for name in trace.uses[0] if not name.startswith(inside)]))
        needed += [(block, trace.uses[block]) for block in range(lo, hi)]
        if hi == len(trace.blocks):
            needed.append((hi, trace.uses[hi]))
        needed[0] = (needed[0][0], [*trace.shared, *needed[0][1]])
        layers: list[Layer] = []
        for block, names in needed:
            fresh = [name for name in dict.fromkeys(canonical.get(name, name) for name in names) if name not in mine]
            mine.update(fresh)
            layers.append(Layer(block, tuple(fresh)))
        chunks.append(layers)
    return chunks
