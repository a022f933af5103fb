"""What is saved while training goes on is what was there when it began."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fold3d.checkpoint import Background, regions_of
from fold3d.checkpoint.background import Writes

CPU = torch.device("cpu")


def test_copies_are_written_while_the_originals_change(tmp_path: Path) -> None:
    go, found = threading.Event(), []

    def write(folder: Path, writes: Writes) -> None:
        go.wait(60)
        found.extend((location, region.data.clone(), region.starts) for location, region in writes)

    background = Background(write, CPU)
    tensors = [torch.full((3, 2), 1.0), torch.tensor(2), torch.full((5,), 3.0).bfloat16(), torch.empty(0, 4)]
    for round_ in range(2):
        found.clear()
        go.clear()
        writes = [(k, region) for k, one in enumerate(tensors) for region in regions_of(k, one, None, 0)]
        background.add(tmp_path, writes)
        before = [one.clone() for one in tensors]
        assert background.start() >= sum(one.nbytes for one in tensors)
        assert background.is_writing
        for one in tensors:
            one.add_(7)
        go.set()
        background.finish(60)
        assert not background.is_writing
        assert len(found) == len(tensors), round_
        for (location, value, _), was in zip(found, before, strict=True):
            assert torch.equal(value, was) and value.dtype == was.dtype, location


def test_the_buffer_is_used_again() -> None:
    places: list[int] = []

    def write(folder: Path, writes: Writes) -> None:
        places.append(writes[0][1].data.data_ptr())

    background = Background(write, CPU)
    for size in (100, 90, 1000):
        background.add(Path(), [(0, regions_of("w", torch.zeros(size), None, 0)[0])])
        background.start()
        background.finish(60)
    assert places[0] == places[1] != places[2]


def test_a_failure_is_raised_once_and_by_finish() -> None:
    def write(folder: Path, writes: Any) -> None:
        raise OSError(28, "No space left on device")

    background = Background(write, CPU)
    background.add(Path(), [])
    background.start()
    with pytest.raises(OSError, match="No space left"):
        background.finish(60)
    background.finish(60)


def test_what_was_added_and_never_begun_is_dropped() -> None:
    written: list[Path] = []
    background = Background(lambda folder, writes: written.append(folder), CPU)
    background.add(Path("first"), [])
    background.finish()
    background.add(Path("second"), [])
    background.start()
    background.finish(60)
    assert written == [Path("second")]


def test_a_disk_that_answers_no_more_is_told() -> None:
    go = threading.Event()
    background = Background(lambda folder, writes: go.wait(60) and None, CPU)
    background.add(Path(), [])
    background.start()
    with pytest.raises(TimeoutError, match="not written within 0"):
        background.finish(0)
    assert background.is_writing
    go.set()
    background.finish(60)
