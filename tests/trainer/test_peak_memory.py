"""What the log says of the memory that each rank has needed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from fold3d.trainer import measuring


def said(monkeypatch: pytest.MonkeyPatch, peaks: list[float] | None) -> list[str]:
    """Returns what is announced where rank 0 gathers these bytes, and another one None."""
    lines: list[str] = []
    monkeypatch.setattr(measuring, "announce", lambda logger, text: lines.append(text))
    gathered = None if peaks is None else [(peak, rank) for rank, peak in enumerate(peaks)]
    engine: Any = SimpleNamespace(
        memory=SimpleNamespace(peak=1e6),
        topology=SimpleNamespace(rank=0),
        world=SimpleNamespace(gather=lambda value: gathered),
        supervise=lambda doing, meets: contextlib.nullcontext(),
    )
    measuring.say_peaks(engine)
    return lines


def test_every_rank_is_named_the_fullest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = said(monkeypatch, [1.5e6, 3e9, 1.5e6])
    assert lines == ["peak memory of this training, MB: rank 1 3,000.0, rank 0 1.5, rank 2 1.5"]


def test_of_many_ranks_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = said(monkeypatch, [1e6 * (rank + 1) for rank in range(20)])
    assert line.startswith("peak memory of this training, MB: rank 19 20.0, rank 18 19.0, ")
    assert line.endswith(", rank 4 5.0, 4 more from 4.0 to 1.0")


@pytest.mark.parametrize("peaks", [None, [1e6]])
def test_one_process_and_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, peaks: list[float] | None) -> None:
    assert said(monkeypatch, peaks) == []
