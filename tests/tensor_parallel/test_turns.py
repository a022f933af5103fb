"""Turns: what one half has sent travels while the other one computes, in forward and in one ordinary backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fold3d._C import swap_warning_handler
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.region import COPY, REDUCE, SUM, Exchange
from fold3d.tensor_parallel.turns import Turns

WIDTH, LAYERS = 6, 4

Event = tuple[str, int]
"""What happened, and with which exchange."""


class Wire(TensorParallelGroup):
    """A group of one rank that writes down what is started and waited for, and whether something came in between."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[Event] = []
        self.number = 0

    def start(self, x: Tensor, how: Exchange, move: str) -> Callable[[], Tensor]:
        self.number += 1
        started = self.number
        self.events.append(("start", started))

        def finish() -> Tensor:
            self.events.append(("wait", started))
            return x if move == SUM else x.clone()

        return finish


class Layer(nn.Module):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wire.exchange(nn.functional.layer_norm(x, (WIDTH,)), COPY)
        y = self.up(y)
        self.wire.events.append(("compute", 0))
        y.register_hook(lambda gradient: self.wire.events.append(("compute", 0)))
        out: Tensor = x + self.wire.exchange(self.down(nn.functional.gelu(y)), REDUCE)
        return out


class SharedSequence(nn.Module):
    """A layer whose ranks share the sequence outside of its region."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.computed(nn.functional.layer_norm(x, (WIDTH,)))
        y = self.wire.exchange(normed, Exchange.gather(1, x.shape[1], sums=True))
        y = self.computed(nn.functional.gelu(self.up(y)))
        out: Tensor = x + self.wire.exchange(self.down(y), Exchange.reduce_scatter(1, x.shape[1]))
        return out

    def computed(self, x: Tensor) -> Tensor:
        self.wire.events.append(("compute", 0))
        x.register_hook(lambda gradient: self.wire.events.append(("compute", 0)))
        return x


def hidden(events: list[Event]) -> list[bool]:
    """Of each sum in the order of starts, whether somebody computed between its start and the wait for it."""
    starts = {number: at for at, (kind, number) in enumerate(events) if kind == "start"}
    waits = {number: at for at, (kind, number) in enumerate(events) if kind == "wait"}
    assert starts.keys() == waits.keys()
    return [any(kind == "compute" for kind, _ in events[starts[n] : waits[n]]) for n in sorted(starts)]


def in_halves(kind: type[nn.Module], kept: bool) -> tuple[list[Event], list[Event], nn.Sequential, Tensor]:
    """Returns what happened in a forward of layers in two halves and in the backward of both, the layers and the input.

    Args:
        kept: whether layers are checkpointed.
    """
    torch.manual_seed(0)
    wire = Wire()
    layers = nn.Sequential(*(kind(wire) for _ in range(LAYERS)))
    x = torch.randn(4, 3, WIDTH, requires_grad=True)
    wire.begin_turns()

    def run(part: Tensor) -> Tensor:
        for layer in layers:
            part = checkpoint(layer, part, use_reentrant=False) if kept else layer(part)
        return part

    halves = wire.turns.run([lambda: run(x[:2]), lambda: run(x[2:])], [], [torch.default_generator])
    forward, wire.events = wire.events, []
    torch.cat(halves).square().sum().backward()
    return forward, wire.events, layers, x


@pytest.mark.parametrize("kept", [False, True])
def test_every_sum_is_hidden_but_the_last(kept: bool) -> None:
    forward, backward, _, _ = in_halves(Layer, kept)
    assert hidden(forward)[:-1] == [True] * (2 * LAYERS - 1), "the last half has nobody left"
    assert [kind for kind, _ in forward].count("start") == 2 * LAYERS
    # The first sum of the gradients begins when the other half has all of its last layer to compute, and so on.
    assert hidden(backward)[:-1] == [True] * (2 * LAYERS - 1)
    assert [kind for kind, _ in backward].count("start") == 2 * LAYERS, "recomputation communicates nothing"


@pytest.mark.parametrize("kept", [False, True])
def test_every_exchange_of_a_sequence_is_hidden_but_the_last(kept: bool) -> None:
    forward, backward, layers, x = in_halves(SharedSequence, kept)
    for events in (forward, backward):
        assert [kind for kind, _ in events].count("start") == 2 * 2 * LAYERS, "recomputation communicates nothing"
        assert sum(hidden(events)) >= 2 * 2 * LAYERS - 2, "what ends a half has nobody left"
    found, x.grad = x.grad, None
    layers(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_gradients_of_some_channels() -> None:
    """Those of the others are the same on every rank already, and are not sent."""

    class Doubling(Wire):
        def start(self, x: Tensor, how: Exchange, move: str) -> Callable[[], Tensor]:
            assert x.shape == (2, 2) and x.is_contiguous()
            return lambda: x.mul_(2)

    ops = Doubling()
    x = torch.randn(4, 3, requires_grad=True)
    how = Exchange.copy(-1, torch.tensor([0, 2]))
    ops.turns.run([lambda: ops.exchange(x[:2], how).sum().backward()], [], [])
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[2.0, 1.0, 2.0]] * 2 + [[0.0] * 3] * 2))


def test_modes_belong_to_one_function() -> None:
    """Context managers, saved-tensor hooks and random numbers of one function do not reach the other."""
    turns = Turns()
    seen: dict[str, list[Any]] = {"one": [], "other": []}

    def one() -> None:
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            with torch.autocast("cpu", torch.bfloat16):
                turns.hand_over()
                seen["one"] += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.rand(1).item()]
            turns.hand_over()
        seen["one"].append(torch.is_grad_enabled())

    def other() -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        seen["other"] += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), top is None, torch.rand(1).item()]
        turns.hand_over()
        seen["other"] += [torch.is_grad_enabled(), torch.rand(1).item()]

    torch.manual_seed(5)
    first, second = torch.rand(1).item(), torch.rand(1).item()
    torch.manual_seed(5)
    turns.run([one, other], [], [torch.default_generator])
    assert seen == {"one": [False, True, first, True], "other": [True, False, True, first, True, second]}
    assert torch.is_grad_enabled() and turns.current is None


def test_turns_do_not_nest_and_hand_over_does_nothing_outside() -> None:
    turns = Turns()
    turns.hand_over()
    with pytest.raises(RuntimeError, match="cannot have"):
        turns.run([lambda: turns.run([], [], [])], [], [])
    assert turns.run([lambda: 1, lambda: 2], [], []) == [1, 2]


def test_warnings_of_torch_while_functions_take_turns_inside_of_its_calls() -> None:
    """Each call that is under way has a handler of warnings on its part of the stack; none may be left behind."""
    turns = Turns()
    seen: list[tuple[int, int]] = []

    class HandsOver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            mine = warning_handler()
            turns.hand_over()
            seen.append((mine, warning_handler()))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def run() -> None:
        HandsOver.apply(torch.ones(1, requires_grad=True))

    before = warning_handler()
    turns.run([run, run], [], [])
    assert warning_handler() == before
    assert len(seen) == 2 and all(mine == then for mine, then in seen)


def warning_handler() -> int:
    found = swap_warning_handler(0)
    swap_warning_handler(found)
    return found
