"""Shard: parts cover a dimension, and a whole tensor is the same after it was taken apart and put together."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fold3d.sharding.shard import Shard, runs_of


@given(st.data())
def test_parts_make_the_whole_again(data: st.DataObject) -> None:
    size, ranks, dim = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1))
    order = data.draw(st.permutations(range(size)))
    owner = data.draw(st.lists(st.integers(0, ranks - 1), min_size=size, max_size=size))
    extra = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
    parts = [[i for i in order if owner[i] == rank] for rank in range(ranks)]
    parts[0] += [i for i in dict.fromkeys(extra) if i not in parts[0]]
    shard = Shard(dim, size, tuple(runs_of(part) for part in parts))
    whole = torch.randn((size, 3) if dim == 0 else (3, size))
    again = torch.full_like(whole, float("nan"))
    for rank in range(ranks):
        part = shard.take(whole, rank)
        assert part.is_contiguous() and tuple(part.shape) == shard.shape(whole.shape, rank)
        assert torch.equal(part, whole.index_select(dim, torch.tensor(parts[rank], dtype=torch.long)))
        shard.put(again, part, rank)
        assert shard.whole_shape(part.shape) == tuple(whole.shape)
        filled = torch.empty_like(part, dtype=torch.float64)
        shard.copy_to_part(filled, whole, rank)
        assert torch.equal(filled, part.double())
    assert torch.equal(again, whole)
    once = [index for rank in range(ranks) for _, first, end in shard.first_held(rank) for index in range(first, end)]
    assert sorted(once) == list(range(size))
    for rank in range(ranks):
        part = shard.take(torch.arange(size)[:, None], rank) if dim == 0 else shard.take(torch.arange(size)[None], rank)
        for place, first, end in shard.first_held(rank):
            assert part.flatten()[place : place + end - first].tolist() == list(range(first, end))
            assert not {*range(first, end)} & {index for lower in parts[:rank] for index in lower}
    times = Counter(index for part in parts for index in part)
    copies = [[times[index] for index in part] for part in parts]
    assert [shard.copies(rank) for rank in range(ranks)] == copies
    alike = [len(shard.holders(rank)) for rank in range(ranks)]
    assert shard.overlaps == any(set(counts) - {count} for counts, count in zip(copies, alike, strict=True))


@given(st.integers(1, 20), st.integers(1, 6))
def test_even_parts(size: int, ranks: int) -> None:
    shard = Shard.even(0, size, ranks)
    lengths = [shard.length(rank) for rank in range(ranks)]
    assert sum(lengths) == size and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
    assert torch.equal(torch.cat([shard.take(torch.arange(size), r) for r in range(ranks)]), torch.arange(size))


def test_who_holds_what() -> None:
    replicated = Shard.replicated((4,), 3)
    assert replicated.is_replicated and not replicated.overlaps and replicated.holders(1) == (0, 1, 2)
    keys = Shard(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)), summed=True)
    assert keys.holders(1) == (0, 1) and keys.holders(2) == (2, 3) and not keys.overlaps and not keys.is_replicated
    fused = Shard(0, 6, (((0, 2), (4, 6)), ((2, 4), (4, 6))))
    assert fused.overlaps and fused.copies(1) == [1, 1, 2, 2] and fused.holders(1) == (1,)


def test_who_holds_what_of_a_giant_is_found() -> None:
    """Counted index by index this would take minutes; a planner asks of every projection."""
    size, ranks = 1 << 22, 8
    fused = Shard(0, size, tuple(((rank, size // 2), (size // 2 + rank, size)) for rank in range(ranks)))
    assert fused.overlaps and not Shard.even(0, size, ranks).overlaps


def test_parts_that_are_none() -> None:
    with pytest.raises(ValueError, match="no rank holds index 1"):
        Shard(0, 2, (((0, 1),), ((0, 1),)))
    with pytest.raises(ValueError, match=r"\[1, 3\) is no piece"):
        Shard(0, 2, (((0, 1),), ((1, 3),)))
