"""What is saved while training goes on is what was there when it began."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d.checkpoint import Background, Part, WeightsFiles, regions_of
from fold3d.topology import Topology

CPU = torch.device("cpu")
ALONE = Topology(dp=1, pp=1, rank=0)
FILES = WeightsFiles(Path())


def note(background: Background, *tensors: Tensor) -> None:
    regions = [region for k, one in enumerate(tensors) for region in regions_of(str(k), one, None, 0)]
    background.to_files(regions, "a note", FILES)


def test_copies_are_written_while_the_originals_change() -> None:
    go, found = threading.Event(), []

    def write(parts: list[Part]) -> None:
        go.wait(60)
        found.extend(parts)

    background = Background(CPU)
    tensors = [torch.full((3, 2), 1.0), torch.tensor(2), torch.full((5,), 3.0).bfloat16(), torch.empty(0, 4)]
    for _ in range(2):
        found.clear()
        go.clear()
        note(background, *tensors)
        before = [one.clone() for one in tensors]
        background.start(ALONE, write)
        assert background.bytes >= sum(one.nbytes for one in tensors) and background.is_writing
        background.wait_for_copies(60)
        for one in tensors:
            one.add_(7)
        go.set()
        background.finish(60)
        assert not background.is_writing
        (part,) = found
        assert (part.note, part.files, part.everywhere) == ("a note", FILES, [])
        for region, was in zip(part.own, before, strict=True):
            assert torch.equal(region.data, was) and region.data.dtype == was.dtype, region.key


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_copies_its_share(replica: int) -> None:
    background = Background(CPU)
    whole = torch.arange(100_000.0)
    found: list[Part] = []
    background.to_files(regions_of("w", whole, None, 0), None, FILES, regions_of("own", torch.ones(3), None, 0))
    background.start(Topology(dp=2, pp=1, rank=replica), found.extend)
    background.finish(60)
    share, own = found[0].own
    assert share.starts == (50_000 * replica,) and torch.equal(share.data, whole[50_000 * replica :][:50_000])
    assert own.key == "own"


def test_what_is_taken_is_not_copied() -> None:
    background = Background(CPU)
    tensor = torch.ones(3)
    note(background, tensor)
    (part,) = background.take()
    assert part.everywhere[0].data.data_ptr() == tensor.data_ptr() and background.take() == []


def test_the_buffer_is_used_again() -> None:
    places: list[int] = []
    background = Background(CPU)
    for size in (100, 90, 1000):
        note(background, torch.zeros(size))
        background.start(ALONE, lambda parts: places.append(parts[0].own[0].data.data_ptr()))
        background.finish(60)
    assert places[0] == places[1] != places[2]


def test_a_failure_is_raised_once_and_by_finish() -> None:
    def write(parts: Any) -> None:
        raise OSError(28, "No space left on device")

    background = Background(CPU)
    background.start(ALONE, write)
    with pytest.raises(OSError, match="No space left"):
        background.finish(60)
    background.finish(60)


def test_what_was_noted_and_never_begun_is_dropped() -> None:
    written: list[int] = []
    background = Background(CPU)
    note(background, torch.zeros(1))
    background.finish()
    background.start(ALONE, lambda parts: written.append(len(parts)))
    background.finish(60)
    assert written == [0]


def test_a_disk_that_answers_no_more_is_told() -> None:
    go = threading.Event()
    background = Background(CPU)
    background.start(ALONE, lambda parts: go.wait(60) and None)
    with pytest.raises(TimeoutError, match="not written within 0"):
        background.finish(0)
    assert background.is_writing
    go.set()
    background.finish(60)
