"""VirtualLayer: a layer of a model on an accelerator that is not there. It takes time, not the CPU.

On the CPU it is the calling thread that it takes up; on the simulated device (simdevice/) the current stream, and
the thread goes on at once.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cluster.scenarios import FLOAT_BYTES, Scenario
from benchmarks.cluster.testbed.wake_up import wake_up_s

_WAKE_UP_S = wake_up_s()


class VirtualLayer(nn.Module):
    """y = x + mean(weight), and its true gradients; each direction takes up the rank for a given time.

    The tensors are real, so what is stashed, sent, summed and updated has the bytes that are asked for. The little
    arithmetic there is counts as part of the time, and so does adding to the gradient of `weight`, which an accelerator
    does itself: a backward does not end before that is done, and hooks registered later run when it has ended.

    Args:
        parameters: floats of `weight`.
        forward_s, backward_s: seconds of one call.
        saved: floats, ones, that the graph keeps beside, and by which the backward multiplies.
    """

    busy: _Busy | None = None
    """What the backward that is under way takes up."""
    spans: list[tuple[VirtualLayer, str, int, int]] | None = None
    """Takes what the calling thread was taken up with, where somebody wants to know: (layer, "F" or "B", start, end),
    ns of time.monotonic."""

    def __init__(self, parameters: int, forward_s: float, backward_s: float, saved: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.saved = saved
        self.watch_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.watch_weight()  # a copy's weight has none of the hooks

    def watch_weight(self) -> None:
        """Whoever adds to the gradient of `weight` ends what the backward takes up."""
        if not isinstance(self.weight, nn.Parameter):
            return
        hooks = self.weight._post_accumulate_grad_hooks
        if hooks and self._accumulated in hooks.values():
            return
        self.weight.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`."""
        y: Tensor = _Occupy.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def _accumulated(self, _: Tensor) -> None:
        assert self.busy is not None, "`weight` has a gradient from elsewhere"
        busy, self.busy = self.busy, None
        busy.end()
        self.took("B", busy)

    def took(self, kind: str, busy: _Busy) -> None:
        """A pass ends."""
        if self.spans is not None:
            self.spans.append((self, kind, busy.began_ns, time.monotonic_ns()))


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
    """Returns `count` layers for the calling rank, each with its share of a rank's time and gradient."""
    calls = scenario.layers * scenario.micro_batches
    pace = scenario.pace(dist.get_rank()) if scenario.slow_host > 1 else 1.0
    forward_s, backward_s = (pace * seconds / calls for seconds in (scenario.forward_s, scenario.backward_s))
    parameters = max(1, scenario.gradient_bytes // scenario.layers // FLOAT_BYTES)
    saved = scenario.saved_bytes // FLOAT_BYTES
    return [VirtualLayer(parameters, forward_s, backward_s, saved) for _ in range(count)]


def make_batch(scenario: Scenario, device: torch.device) -> Tensor:
    """Returns a replica's batch, (micro_batches, floats of an activation)."""
    return torch.zeros(scenario.micro_batches, scenario.activation_bytes // FLOAT_BYTES, device=device)


class _Busy:
    """What computes on `device` is busy for so many seconds from here on, with what is computed meanwhile."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.began_ns = time.monotonic_ns()
        self._seconds = seconds
        self._on_stream: Any = None
        if device.type == "sim":
            from simdevice import sim  # only where there is one: it becomes torch's accelerator

            self._on_stream = sim.Occupation()
        else:
            self._due = time.perf_counter() + seconds

    def end(self) -> None:
        """Computes nothing more: waits for the end, on a device without the host."""
        if self._on_stream is not None:
            self._on_stream.end(1e3 * self._seconds)
        else:
            _sleep_until(self._due)


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: VirtualLayer) -> Tensor:
        busy = _Busy(x.device, layer.forward_s)
        layer.watch_weight()  # FSDP has put another parameter in its place
        ctx.save_for_backward(weight, x.new_ones(layer.saved) if layer.saved else None)
        ctx.layer = layer
        y = x + weight.mean()
        busy.end()
        layer.took("F", busy)
        return y

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        layer: VirtualLayer = ctx.layer
        assert layer.busy is None, "a layer may be used once in each backward"
        (gradient,) = outputs
        weight, saved = ctx.saved_tensors  # in a checkpoint, this runs the forward again
        busy = _Busy(weight.device, layer.backward_s)
        if saved is not None:
            gradient = gradient * saved[-1]
        of_weight = (gradient.sum() / weight.numel()).expand_as(weight).contiguous()
        if _is_accumulated(weight):
            layer.busy = busy
        else:
            busy.end()
        return gradient, of_weight, None


def _is_accumulated(weight: Tensor) -> bool:
    """Returns whether the backward that is under way adds to `weight.grad`; torch.autograd.grad does not."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # it asks for this very gradient
        return False


def _sleep_until(end: float) -> None:
    left = end - time.perf_counter() - _WAKE_UP_S
    if left > 0:
        time.sleep(left)
