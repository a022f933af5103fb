"""Boxes of tensors go to their bytes in a file and come back, and all ranks together write each byte once."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fold3d.checkpoint import regions as module
from fold3d.checkpoint.regions import (
    Box,
    boxes,
    read_box,
    regions_of,
    regions_of_piece,
    spread_over,
    windows,
    write_box,
)
from fold3d.data_parallel.bucket import Piece, flattened
from fold3d.sharding.shard import Shard

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@given(SHAPES, st.data())
def test_a_range_is_boxes_in_their_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = [whole[tuple(map(slice, s, map(sum, zip(s, e, strict=True))))] for s, e in boxes(shape, start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.long), *(one.flatten() for one in found)]).tolist() == list(
        range(start, stop)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.integers(1, 40))
def test_windows_are_small_and_make_up_the_box(shape: list[int], most: int) -> None:
    before, module.WINDOW = module.WINDOW, most
    try:
        found = list(windows(shape, 2))
    finally:
        module.WINDOW = before
    whole = torch.zeros(shape)
    for starts, extents in found:
        whole[tuple(slice(s, s + e) for s, e in zip(starts, extents, strict=True))] += 1
        assert 2 * math.prod(extents) <= max(2, most)
    assert (whole == 1).all()


@pytest.mark.parametrize("window", [8, 1 << 20])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_box_goes_to_its_bytes_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, transposed: bool
) -> None:
    """Each box of each size at each place of a tensor of 3 x 4 x 2, behind 5 bytes of something else."""
    monkeypatch.setattr(module, "WINDOW", window)
    shape, path = (3, 4, 2), tmp_path / "file"
    values = torch.arange(24, dtype=torch.float64).view(shape)
    ends = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    for spans in itertools.product(*ends):
        place = tuple(slice(*span) for span in spans)
        path.write_bytes(b"front" + bytes(24 * 8) + b"behind")
        descriptor = os.open(path, os.O_RDWR)
        box = values[place]
        if transposed:
            box = box.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        starts = [first for first, _ in spans]
        write_box(descriptor, 5, shape, starts, box)
        back = torch.empty_like(box)
        read_box(descriptor, 5, shape, starts, back)
        os.close(descriptor)
        content = path.read_bytes()
        found = torch.frombuffer(bytearray(content[5:-6]), dtype=torch.float64).view(shape)
        expected = torch.zeros(shape, dtype=torch.float64)
        expected[place] = box
        assert torch.equal(found, expected) and torch.equal(back, box)
        assert content[:5] == b"front" and content[-6:] == b"behind"


def test_a_file_that_ends_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(20))
    with open(tmp_path / "file", "rb") as file, pytest.raises(EOFError, match="4 bytes too early"):
        read_box(file.fileno(), 0, (3, 2), (2, 0), torch.empty(1, 2))


FUSED = Shard(0, 6, (((0, 2), (4, 6)), ((2, 4), (4, 6))))
COLUMNS = Shard(1, 5, (((3, 5),), ((0, 3),)))
NOTHING = Shard(0, 6, ((), ((0, 6),)))


def laid(regions: list[Box[str]]) -> tuple[Tensor, Tensor]:
    """Returns the whole tensor that regions make up, and how many of them have each element."""
    whole, count = torch.zeros(regions[0].whole), torch.zeros(regions[0].whole)
    for region in regions:
        place = tuple(slice(s, s + n) for s, n in zip(region.starts, region.data.shape, strict=True))
        whole[place] = region.data
        count[place] += 1
    return whole, count


@pytest.mark.parametrize("shard", [None, FUSED, COLUMNS, NOTHING])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_all_ranks_write_each_element_once(
    monkeypatch: pytest.MonkeyPatch, shard: Shard | None, replicas: int, small: int
) -> None:
    monkeypatch.setattr(module, "_SMALL", small)
    whole = torch.randn(6, 5)
    found: list[Box[str]] = []
    for rank in range(1 if shard is None else shard.ranks):
        part = whole if shard is None else shard.take(whole, rank)
        mine = regions_of("w", part, shard, rank)
        for replica in range(replicas):
            found += spread_over(mine, replicas, replica)
    written, count = laid(found)
    assert torch.equal(written, whole) and (count == 1).all()


@pytest.mark.parametrize("shard", [None, FUSED, COLUMNS])
@pytest.mark.parametrize("cut", [1, 4, 7, 11])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pieces_of_parts_make_up_the_whole(shard: Shard | None, cut: int, channels_last: bool) -> None:
    """A shard of a bucket ends anywhere within a parameter, in the order of its memory."""
    whole = torch.randn(6, 5, 2, 3)
    found: list[Box[str]] = []
    for rank in range(1 if shard is None else shard.ranks):
        part = whole if shard is None else shard.take(whole, rank)
        if channels_last:
            part = part.contiguous(memory_format=torch.channels_last)
        parameter = nn.Parameter(part)
        flat = flattened(part, parameter)
        edges = [0, *range(cut, flat.numel(), 2 * cut), flat.numel()]
        for first, end in itertools.pairwise(edges):
            piece = Piece("w", parameter, 0, 100 + first, 100 + end, first)
            found += regions_of_piece("w", piece, flat[first:end], shard, rank, once=True)
            back = torch.zeros(end - first)
            for region in regions_of_piece("w", piece, back, shard, rank, once=False):
                place = tuple(slice(s, s + n) for s, n in zip(region.starts, region.data.shape, strict=True))
                region.data.copy_(whole[place])
            assert torch.equal(back, flat[first:end])
    written, count = laid(found)
    assert torch.equal(written, whole) and (count == 1).all()


def test_a_number_without_dimensions(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.tensor(3.0))
    (region,) = regions_of_piece("w", Piece("w", parameter, 0, 0, 1, 0), torch.tensor([5.0]), None, 0, once=True)
    assert region.data.shape == () and region.starts == ()
    (tmp_path / "file").write_bytes(bytes(8))
    with open(tmp_path / "file", "r+b") as file:
        write_box(file.fileno(), 4, (), (), region.data)
        back = torch.zeros(())
        read_box(file.fileno(), 4, (), (), back)
    assert back == 5.0 and (tmp_path / "file").read_bytes()[:4] == bytes(4)
