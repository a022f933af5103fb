"""OverlapTrial: both ways in turns, then the one that was faster on the slowest rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fold3d.tensor_parallel.sub_pipelined import overlap_trial
from fold3d.tensor_parallel.sub_pipelined.overlap_trial import STEPS_EACH, OverlapTrial


def ways(trial: OverlapTrial, seconds: Callable[[bool], float], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Runs some steps that take so long; returns which of them ran in halves."""
    now = 0.0
    monkeypatch.setattr(overlap_trial.time, "perf_counter", lambda: now)
    ran = []
    for _ in range(2 * STEPS_EACH + 3):
        with trial.step():
            ran.append(trial.in_halves)
            now += seconds(trial.in_halves)
    return ran


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_stays(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = OverlapTrial("auto", lambda times: None)
    ran = ways(trial, lambda halves: 1.0 if halves == faster else 2.0, monkeypatch)
    assert ran[: 2 * STEPS_EACH + 1] == [step % 2 == 0 for step in range(2 * STEPS_EACH + 1)]
    assert ran[2 * STEPS_EACH + 1 :] == [faster] * 2


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowest(times: Tensor) -> None:
        times.copy_(torch.maximum(times, torch.tensor([5.0, 3.0])))

    assert ways(OverlapTrial("auto", slowest), lambda halves: 1.0 if halves else 2.0, monkeypatch)[-1] is False


@pytest.mark.parametrize(("asked", "halves"), [("sub", True), ("none", False)])
def test_what_is_asked_for_is_not_tried(asked: str, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(times: Tensor) -> None:
        raise AssertionError

    assert set(ways(OverlapTrial(asked, never), lambda way: 1.0, monkeypatch)) == {halves}
