"""VirtualLayer: a layer of a model on an accelerator that is not there. It takes time, not the CPU."""

from __future__ import annotations

import functools
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cluster.scenarios import FLOAT_BYTES, Scenario

_SLEEPS, _SLEEP_SECONDS = 50, 2e-3


class VirtualLayer(nn.Module):
    """y = x + mean(weight), and its true gradients; each direction occupies the calling thread for a given time.

    The tensors are real, so what is stashed, sent, summed and updated has the bytes that are asked for. The little
    arithmetic there is counts as part of the time.

    Args:
        parameters: floats of `weight`.
        forward_s, backward_s: seconds of one call.
    """

    def __init__(self, parameters: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`."""
        y: Tensor = _Occupy.apply(x, self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return y


class VirtualModel(nn.Module):
    """The layers of all ranks of a scenario's replica as one plain module; the loss is the mean of what comes out."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layers(scenario, scenario.layers * scenario.pp))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss of micro-batch `x`, scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def make_layers(scenario: Scenario, count: int) -> list[VirtualLayer]:
    """Returns `count` layers, each with its share of a rank's time and gradient."""
    wake_up_seconds()  # now, not in the first layer's time
    calls = scenario.layers * scenario.micro_batches
    parameters = max(1, scenario.gradient_bytes // scenario.layers // FLOAT_BYTES)
    return [VirtualLayer(parameters, scenario.forward_s / calls, scenario.backward_s / calls) for _ in range(count)]


def make_batch(scenario: Scenario) -> Tensor:
    """Returns a replica's batch, (micro_batches, floats of an activation)."""
    return torch.zeros(scenario.micro_batches, scenario.activation_bytes // FLOAT_BYTES)


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        end = time.perf_counter() + forward_s
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        y = x + weight.mean()
        _sleep_until(end)
        return y

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        end = time.perf_counter() + ctx.backward_s
        (gradient,) = outputs
        (weight,) = ctx.saved_tensors
        of_weight = (gradient.sum() / weight.numel()).expand_as(weight).contiguous()
        _sleep_until(end)
        return gradient, of_weight, None, None


def _sleep_until(end: float) -> None:
    left = end - time.perf_counter() - wake_up_seconds()
    if left > 0:
        time.sleep(left)


@functools.cache
def wake_up_seconds() -> float:
    """Returns by how much a sleep on this machine is longer than asked for, measured by a tenth of a second of sleeps.

    A layer's sleep is shorter by it, so that a layer takes its time and not a few percent more, whoever runs it.
    """
    late = []
    for _ in range(_SLEEPS):
        end = time.perf_counter() + _SLEEP_SECONDS
        time.sleep(_SLEEP_SECONDS)
        late.append(time.perf_counter() - end)
    return max(0.0, median(late))
