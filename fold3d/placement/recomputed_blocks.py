"""Which blocks of a cut model compute again, each by itself, what their backward needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fold3d.recompute import Recompute
from fold3d.topology import LOOP, stage_of


def recomputed_places(counts: Sequence[int], pp: int, recompute: Recompute, style: str = LOOP) -> list[list[int]]:
    """Returns of every chunk the places within it of the blocks that recompute each by itself.

    Every so many blocks of a stage do, whatever chunks they are in. A model that is one chunk recomputes block by block
    where whole chunks were asked for: its backward follows its forward.

    Args:
        counts: blocks of every chunk.
        pp: stages.
        style: on which of them the chunks live.
    Raises: ConfigError when `recompute` is said of another number of chunks.
    """
    found: list[list[int]] = []
    passed: dict[tuple[int, int], int] = {}  # (stage, every): blocks so far
    for chunk, (choice, count) in enumerate(zip(recompute.of_chunks(len(counts)), counts, strict=True)):
        every = 1 if choice.full and len(counts) == 1 else choice.every
        mine: list[int] = []
        for place in range(count if every else 0):
            stage = stage_of(chunk, pp, style)
            number = passed.setdefault((stage, every), 0)
            passed[stage, every] += 1
            if number % every == 0:
                mine.append(place)
        found.append(mine)
    return found


def recomputed_blocks(
    blocks: Sequence[str], ranges: Sequence[tuple[int, int]], pp: int, recompute: Recompute, style: str = LOOP
) -> list[str]:
    """Returns the names of these blocks; one that runs several times recomputes in all runs if it does in any.

    Args:
        ranges: blocks [first, end) of every chunk; of a model that is one chunk nothing may be known of them.
    Raises: ConfigError as `recomputed_places`.
    """
    parts = [blocks] if len(ranges) == 1 else [blocks[first:end] for first, end in ranges]
    places = recomputed_places([len(part) for part in parts], pp, recompute, style)
    return list(dict.fromkeys(part[place] for part, mine in zip(parts, places, strict=True) for place in mine))


def modules_inside(block: nn.Module, *, every_name: bool = False) -> list[str]:
    """Returns the names of the modules of a block that have a forward, outer ones first.

    Args:
        every_name: all names of a module that is in several places; otherwise the first alone.
    """
    unimplemented = nn.Module.forward
    named = block.named_modules(remove_duplicate=not every_name)
    return [name for name, module in named if name and type(module).forward is not unimplemented]
