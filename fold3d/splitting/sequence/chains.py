"""find_chains(): which blocks hand their hidden state to which, as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from fold3d.sharding.split import Path
from fold3d.splitting.probing.capture import CapturedCall
from fold3d.tensor_parallel.slices import paths_of
from fold3d.trace.model_trace import Trace


class NoSequenceError(Exception):
    """Why the ranks cannot share the sequence."""


@dataclass(frozen=True, slots=True)
class Link:
    """A block's place among those that hand parts to each other."""

    hidden: Path
    result: Path
    begins: bool
    ends: bool


def find_chains(calls: Mapping[str, CapturedCall], trace: Trace) -> dict[str, Link]:
    """Returns each block's place. Raises: NoSequenceError when a block hands its hidden state to no other as it is,
    or runs several times."""
    for leak in trace.leaks:
        raise NoSequenceError(leak)
    for name, times in Counter(trace.blocks).items():
        if times > 1:  # it may be handed the whole in one run and a part in another
            raise NoSequenceError(f"{name} runs several times")
    blocks = list(calls)
    hidden: dict[str, Path] = {}
    results: dict[str, Path] = {}
    for number, (before, name) in enumerate(pairwise(blocks)):
        handed = [(path, result) for path, (block, result) in calls[name].handed.items() if block == before]
        if not handed:
            continue
        # What comes first in its result is what a block is for; others ride along.
        path, result = min(handed, key=lambda pair: [str(key) for key in pair[1]])
        if trace.modified[number]:
            raise NoSequenceError(f"what {before} returns is written to in place")
        hidden[name], results[before] = path, result
    links: dict[str, Link] = {}
    for number, name in enumerate(blocks):
        after = blocks[number + 1] if number + 1 < len(blocks) else ""
        begins, ends = name not in hidden, name not in results
        if begins and ends:
            raise NoSequenceError(f"no other block takes what {name} returns, as it is")
        path = hidden[after] if begins else hidden[name]
        if begins and not any(at[1:] == path for at, _ in paths_of((calls[name].args, calls[name].kwargs))):
            raise NoSequenceError(f"{name} is called in another way than {after}")
        result = results[blocks[number - 1]] if ends else results[name]
        links[name] = Link(path, result, begins, ends)
    return links
