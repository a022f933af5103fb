"""OverlapTrial: all ways in turns, then the one that was fastest on the slowest rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fold3d.config import TP_WAYS
from fold3d.tensor_parallel import overlap_trial
from fold3d.tensor_parallel.overlap_trial import STEPS_EACH, OverlapTrial

TRIED = len(TP_WAYS) * STEPS_EACH + 1


def ways(trial: OverlapTrial, seconds: Callable[[str], float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs some steps that take so long; returns how each of them ran."""
    now = 0.0
    monkeypatch.setattr(overlap_trial.time, "perf_counter", lambda: now)
    ran = []
    for _ in range(TRIED + 2):
        with trial.step():
            ran.append(trial.way)
            assert (trial.in_halves, trial.fuses) == (trial.way == "sub", trial.way == "fused")
            now += seconds(trial.way)
    return ran


@pytest.mark.parametrize("fastest", TP_WAYS)
def test_the_fastest_way_stays(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = OverlapTrial("auto", lambda times: None)
    ran = ways(trial, lambda way: 1.0 if way == fastest else 2.0, monkeypatch)
    assert ran[:TRIED] == [TP_WAYS[step % len(TP_WAYS)] for step in range(TRIED)]
    assert ran[TRIED:] == [fastest] * 2


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowest(times: Tensor) -> None:
        times.copy_(torch.maximum(times, torch.tensor([5.0, 3.0, 4.0])))

    last = ways(OverlapTrial("auto", slowest), lambda way: 1.0 if way == "sub" else 2.0, monkeypatch)[-1]
    assert last == TP_WAYS[1]


@pytest.mark.parametrize("asked", TP_WAYS)
def test_what_is_asked_for_is_not_tried(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(times: Tensor) -> None:
        raise AssertionError

    assert set(ways(OverlapTrial(asked, never), lambda way: 1.0, monkeypatch)) == {asked}


@pytest.mark.parametrize(("limit", "stays"), [(1.5, "none"), (3.0, "sub")])
def test_a_prediction_that_does_not_hold_is_tried(limit: float, stays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves were predicted to be faster; they take 2 s, and the whole 1 s."""
    trial = OverlapTrial("sub", lambda times: None, limit)

    def seconds(way: str) -> float:
        return 1.0 if way == "none" else 2.0

    assert set(ways(trial, seconds, monkeypatch)[: STEPS_EACH + 1]) == {"sub"}
    assert ways(trial, seconds, monkeypatch)[-1] == stays and trial.is_decided
