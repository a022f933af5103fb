"""Which channels reach the same, told from few runs of a block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fold3d.splitting.probe import Response, atoms

HEADS, WIDTH = 24, 16


def queries_keys_values(groups: int) -> list[set[int]]:
    """Returns what each output channel of a fused projection reaches: queries and keys all of their heads' results,
    values one channel of each."""
    together = HEADS // groups

    def channels(head: int) -> set[int]:
        return set(range(head * WIDTH, (head + 1) * WIDTH))

    queries = [channels(head) for head in range(HEADS) for _ in range(WIDTH)]
    of_group = [set(range(g * together, (g + 1) * together)) for g in range(groups)]
    keys = [set().union(*map(channels, heads)) for heads in of_group for _ in range(WIDTH)]
    values = [{head * WIDTH + k for head in heads} for heads in of_group for k in range(WIDTH)]
    return [*queries, *keys, *values]


def uneven() -> list[set[int]]:
    """Returns runs of several lengths; one whose first channel reaches less than the others; channels without any."""
    runs = [[{0, 1}] * 4, [{2}] * 4, [{3}, {3, 4}, {4}, {3, 4}], [{5}] * 4, [set()] * 3, [{6}] * 4, [{7}] * 2]
    return [sinks for run in runs for sinks in run]


@pytest.mark.parametrize(
    "reached, most",
    [
        (queries_keys_values(HEADS), 70),
        (queries_keys_values(4), 70),
        (uneven(), 120),
        ([{k} for k in range(999)], 20),
    ],
    ids=["heads", "groups", "uneven", "neurons"],
)
def test_atoms_reach_what_their_channels_do(reached: list[set[int]], most: int) -> None:
    runs = 0
    size = 1 + max(max(sinks, default=0) for sinks in reached)

    def respond(channels: Sequence[int]) -> Response:
        nonlocal runs
        runs += 1
        found = set().union(*(reached[channel] for channel in channels))
        mask = torch.zeros(size, dtype=torch.bool)
        mask[sorted(found)] = True
        return Response({"out": mask} if found else {}, frozenset())

    found = atoms(respond, len(reached))
    assert [atom.first for atom in found] == [0, *(atom.end for atom in found[:-1])]
    assert found[-1].end == len(reached)
    for atom in found:
        together = set().union(*reached[atom.first : atom.end])
        sinks = {int(k) for k in atom.sinks["out"]} if "out" in atom.sinks else set()
        assert sinks == together == reached[atom.first]
    assert runs <= most
