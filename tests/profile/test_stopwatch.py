"""time_call: on a module whose time is the test's own."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fold3d import _C
from fold3d.profile.calls import ModuleCall, TensorShape, Timing, time_call

CLOCK = [0.0]


class Busy(nn.Module):
    """A forward that takes one after the other of `seconds`; a backward takes no time."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = list(seconds)
        self.runs = 0

    def forward(self, x):
        CLOCK[0] += self.seconds[self.runs % len(self.seconds)]
        RUNS[0] = self.runs = self.runs + 1
        return x * self.weight


RUNS = [0]


def measure(monkeypatch, *durations: float, seconds: float = 10.0) -> Timing:
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK[0])
    shape = TensorShape((2, 4), torch.float32)
    call = ModuleCall((shape,), {}, shape)
    return time_call(Busy(*durations), call, torch.device("cpu"), seconds=seconds, autocast=nullcontext)


def test_disturbed_runs_do_not_count(monkeypatch):
    found = measure(monkeypatch, 5.0, *(0.01, 0.05, 0.09) * 10)
    assert found.forward == pytest.approx(0.01)
    assert found.backward == 0.0


def test_one_lucky_run_does_not_count_either(monkeypatch):
    assert measure(monkeypatch, 0.02, 0.001, *(0.02,) * 30).forward == pytest.approx(0.02)


def test_stops_when_the_time_is_over(monkeypatch):
    assert measure(monkeypatch, 1.0, seconds=0.5).forward == pytest.approx(1.0)
    assert RUNS[0] == 2, "one to warm up, one that counts"
    measure(monkeypatch, 0.001, seconds=10.0)
    assert 5 < RUNS[0] < 50


class Watched(nn.Module):
    """Its parameter's hook knows the module: a cycle that Python's collector does not see through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1_000_000))
        self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch()

    def _watch(self) -> None:
        self.weight.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _accumulated(self, _: torch.Tensor) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


def test_nothing_of_the_copy_stays() -> None:
    module = Watched()
    shape = TensorShape((3,), torch.float32)
    call = ModuleCall((shape,), {}, shape)
    assert _C.count_cpu_bytes(True)
    try:
        before = _C.live_cpu_bytes()
        time_call(module, call, torch.device("cpu"), seconds=0.0, autocast=nullcontext)
        assert _C.live_cpu_bytes() - before < 1_000_000  # weight and gradient are 8 MB
    finally:
        _C.count_cpu_bytes(False)
    assert module.weight.numel() == 1_000_000
