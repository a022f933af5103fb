"""What fold3d records of a device: layers whose kernels take a time that is known, and that the host does not wait for.

Each function runs on every rank and returns what the test looks at.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fold3d
from fold3d import _C
from simdevice import sim

MICRO_BATCHES = 4
FORWARD_MS, BACKWARD_MS = 4.0, 8.0
LAYERS = 4
WIDTH = 256


class Sleeping(nn.Module):
    """A layer whose forward and backward occupy the stream."""

    factor = 1.0
    """By which all layers are slower."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.device.type == "sim":
            sim.sleep(FORWARD_MS * Sleeping.factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if gradients[0].device.type == "sim":
            sim.sleep(BACKWARD_MS * Sleeping.factor)
        return gradients[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeping() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _engine(**layout: Any) -> fold3d.Engine:
    torch.manual_seed(0)
    config = fold3d.ParallelConfig(micro_batches=MICRO_BATCHES, blocks="layers", comm_timeout=60, **layout)
    return fold3d.Engine(
        Model(),
        config,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        max_grad_norm=1.0,
        device=torch.device("sim", 0),
        example={"x": torch.zeros(1, WIDTH)},
    )


def of_a_step(**layout: Any) -> SimpleNamespace:
    """Runs some steps and returns what is recorded of the last but one: `records`, `step_ms` and `compute_ms` of its
    breakdown, `slept_ms`, for how long kernels slept in its forwards ("F") and its backwards ("B"), and `host_waits`,
    how often the training thread waited for the device."""
    engine = _engine(**layout)
    batch = {"x": torch.randn(2 * MICRO_BATCHES, WIDTH, device="sim")}
    for _ in range(6):  # until the first plan is made
        engine.step(batch)
    before = sim.host_waits()
    output = engine.step(batch)
    waits = sim.host_waits() - before
    engine.step(batch)
    breakdown = output.breakdown
    engine.close()
    assert not sim.take_reports()
    passes = MICRO_BATCHES * LAYERS / engine.topology.pp
    return SimpleNamespace(
        records=list(breakdown.records),
        step_ms=breakdown.step_ms,
        compute_ms=breakdown.compute_ms,
        slept_ms={"F": FORWARD_MS * passes, "B": BACKWARD_MS * passes},
        host_waits=waits,
    )


def forwards_of_two_steps(**layout: Any) -> list[list[str]]:
    """Returns the forwards in the records of the last step, and of the one before, in the order in which they were
    asked for: both after the last, and nobody looked at a step until then."""
    engine = _engine(**layout)
    batch = {"x": torch.randn(2 * MICRO_BATCHES, WIDTH, device="sim")}
    before, last = (engine.step(batch) for _ in range(2))
    found = [one.breakdown.records for one in (last, before)]
    engine.close()
    return [sorted(action for lane, action, *_ in one if lane == "compute" and "F" in action) for one in found]


def host_waits(**layout: Any) -> tuple[int, int]:
    """Returns how often the training thread waits for the device in a step, with the device's times and with those of
    launches, for which it need not ask the device."""
    with_times = of_a_step(**layout).host_waits
    clock = _C.StreamClock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "StreamClock", lambda device: clock(torch.device("cpu")))
        return with_times, of_a_step(**layout).host_waits


def predictions(phases: Sequence[tuple[int, float, float]], **layout: Any) -> list[float | None]:
    """Returns what is predicted of a step after each phase.

    Args:
        phases: of each, how many steps it has, by which factor all layers are slower, and the speed of the network in
            bytes per second, 0 for as fast as it is.
    """
    predicted = []
    engine = None
    batch = {"x": torch.randn(2 * MICRO_BATCHES, WIDTH, device="sim")}
    for steps, Sleeping.factor, speed in phases:
        with sim.network(speed):
            engine = engine or _engine(**layout)
            for _ in range(steps):
                engine.step(batch)
            engine.flush()
        assert engine._rank is not None
        expected = engine._rank.step.replanner.expected
        predicted.append(None if expected is None else expected.step_ms)
    Sleeping.factor = 1.0
    assert engine is not None
    engine.close()
    return predicted
