"""I and W in the Executor: together they are B, to the bit, whatever is in a chunk; I leaves to W what it can."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fold3d import _C
from fold3d import schedule as schedules

WIDTH, ROWS = 6, 4
WHOLE = "0F0,1F0,2F0,2B0,1B0,0B0,0F1,1F1,2F1,2B1,1B1,0B1"
SPLIT = "0F0,1F0,2F0,2I0,1I0,0F1,1F1,2F1,2I1,2W0,1W0,0I0,0W0,1I1,2W1,1W1,0I1,0W1"
"""1F1 comes between 1I0 and 1W0 and sees what I has left."""
EVENTS: list[str] = []
"""What code of the user's ran in a backward, in any order."""


class Middle(nn.Module):
    """A chunk with something in it that a split must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        EVENTS.append("block")
        return x + self.other(functional.gelu(self.linear(self.norm(x))))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.block(x)]


class Shared(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.block(torch.tanh(self.block(x)))]


class Tied(Middle):
    """One weight as a matrix, as a factor, transposed, and where no input comes by."""

    def forward(self, x: Tensor) -> list[Tensor]:
        weight = self.linear.weight
        return [x @ weight * weight.sum() + self.block(x) @ weight.t() + weight.square().mean()]


class TensorHooks(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda gradient: EVENTS.append("weight hook") or 3 * gradient)

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.linear(x)
        hidden.register_hook(lambda gradient: EVENTS.append("tensor hook") or 2 * gradient)
        out = self.other(hidden)
        out.grad_fn.register_hook(lambda into, _: EVENTS.append(f"node hook {[g is not None for g in into]}"))
        return [out + x]


class RetainsGrad(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        self.hidden = self.linear(x)
        self.hidden.retain_grad()
        self.hidden.register_hook(lambda _: EVENTS.append(str(self.hidden.grad)))
        return [self.other(self.hidden)]


class ModuleHooks(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(
            lambda _, into, out: EVENTS.append(f"module hook {into[0].sum()} {out[0].sum()}")
        )


class Frozen(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)


class NoWeights(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Detached(Middle):
    """No gradient for the chunk before."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return super().forward(x.detach())


class Scaled(torch.autograd.Function):
    """x * weight in the user's own code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        EVENTS.append("custom function")
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class CustomFunction(Middle):
    """Its first weight is also used by a linear layer, where I could leave it to W."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.block(Scaled.apply(x, self.linear.weight[0]) + Scaled.apply(x, self.norm.weight))]


class CustomFunctionOfWeights(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [functional.linear(self.block(x), Scaled.apply(self.linear.weight, self.linear.bias))]


class Checkpointed(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [checkpoint(self.block, x, use_reentrant=False)]


class PartlyCheckpointed(Middle):
    """Weights are used inside and outside of the checkpoint; a layer of its own is outside only."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.outside(checkpoint(self.block, self.block(x), use_reentrant=False))]


class Reentrant(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [checkpoint(self.block, x, use_reentrant=True)]


class Offloaded(Middle):
    """What is saved goes elsewhere; coming back is the user's code."""

    def forward(self, x: Tensor) -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: EVENTS.append("unpacked") or tensor
        ):
            return [self.block(x)]


class Dropout(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [functional.dropout(self.block(x), 0.5) + checkpoint(self.drop, x, use_reentrant=False)]

    def drop(self, x: Tensor) -> Tensor:
        return self.block(functional.dropout(x, 0.5))


class Autocast(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [self.linear(self.block(x).float()).float()]


class InPlace(Middle):
    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.linear(x).relu_()
        buffer = torch.zeros(ROWS, WIDTH)
        buffer[:, :3] = self.other(hidden)[:, :3]
        buffer[:, 3:].copy_(self.norm.weight[3:] * hidden[:, 3:])
        return [buffer]


class Recurrent(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.block(self.recurrent(x[None])[0][0])]


class Attention(Middle):
    """Learned queries attend to the input: gradients of weights and of the input from one node."""

    def forward(self, x: Tensor) -> list[Tensor]:
        query = self.linear.weight[:ROWS]
        attended = functional.scaled_dot_product_attention(query[None, None], x[None, None], self.other(x)[None, None])
        return [attended[0, 0]]


class Several(Middle):
    """Outputs: the input itself, a weight alone, whole numbers, one without gradient, two parts of one result."""

    def forward(self, x: Tensor) -> list[Tensor]:
        first, second = self.linear(x).split(3, dim=-1)
        return [x, 2 * self.norm.weight, torch.arange(3), x.detach(), first.exp(), second]


class Unused(Middle):
    """A part of what it computes is never used; the input is not used at all."""

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = self.linear(x).unbind(0)
        del parts
        return [self.norm.weight.expand(ROWS, WIDTH) * 1.0]


class Chunk:
    """What the Executor runs."""

    def __init__(self, forward: Callable[[int, list[Tensor]], list[Tensor]], *, is_last: bool = False):
        self._forward, self._is_last = forward, is_last

    def forward(self, micro_batch: int, received: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        sent = self._forward(micro_batch, received)
        return sent, sent[0].detach() if self._is_last else None

    def forward_first(
        self, micro_batch: int, received: list[Tensor]
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        return *self.forward(micro_batch, received), [torch.tensor(micro_batch)]

    def recompute(self, micro_batch: int, received: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        assert [int(one) for one in kept] == [micro_batch]
        return self._forward(micro_batch, received)

    def reduce(self) -> None:
        raise AssertionError("one replica")


class Run:
    """Two micro-batches through three chunks; `left` are the weights of the middle one without a gradient after I."""

    def __init__(self, middle: type[Middle], text: str, *, first_learns: bool = True, recompute: bool = False):
        torch.manual_seed(7)
        EVENTS.clear()
        self.first, self.middle, self.head = nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, 1)
        self.first.requires_grad_(first_learns)
        self.counts: dict[str, int] = {}
        self.left: set[str] | None = None
        self.model = nn.ModuleDict({"first": self.first, "middle": self.middle, "head": self.head})
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._counter(name))
        data = torch.randn(2, ROWS, WIDTH)
        chunks = [
            Chunk(lambda i, _: [self.first(data[i])]),
            Chunk(self._middle),
            Chunk(lambda _, received: [sum(self._loss(x) for x in received if x.is_floating_point())], is_last=True),
        ]
        executor = _C.Executor(chunks, 0, 1, {}, torch.device("cpu"), 60.0, "rank 0")
        lowered = schedules.lower(schedules.parse_csv(text + "\n"), reduce=False, recompute=[recompute] * 3)
        self.losses = executor.run(lowered, 0, True, [0, 1])
        self.events = sorted(EVENTS)
        self.gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def _middle(self, micro_batch: int, received: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(micro_batch)
        if micro_batch == 1 and self.left is None:
            self.left = {name for name, p in self.middle.named_parameters() if p.requires_grad and p.grad is None}
        return self.middle(received[0])

    def _loss(self, x: Tensor) -> Tensor:
        return functional.softplus(self.head(functional.pad(x, (0, WIDTH - x.shape[-1])))).sum()

    def _counter(self, name: str) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            self.counts[name] = self.counts.get(name, 0) + 1

        return count


ALL = {"linear.weight", "linear.bias", "norm.weight", "norm.bias", "other.weight", "other.bias"}
LINEAR = {"linear.weight", "linear.bias"}
LEFT: dict[type[Middle], set[str]] = {
    Middle: ALL,
    Shared: ALL,
    Tied: ALL,
    # A node with a hook runs once: linear's for the tensor's, other's for its own.
    TensorHooks: ALL - LINEAR - {"other.weight", "other.bias"},
    RetainsGrad: ALL - LINEAR,
    ModuleHooks: ALL,
    Frozen: ALL - LINEAR,
    NoWeights: set(),
    Detached: ALL,
    CustomFunction: ALL - {"linear.weight", "norm.weight"},
    CustomFunctionOfWeights: ALL,
    Checkpointed: set(),
    PartlyCheckpointed: {"outside.weight", "outside.bias"},
    Reentrant: set(),
    Offloaded: set(),
    Dropout: set(),
    Autocast: ALL,
    InPlace: ALL,
    Recurrent: ALL | {f"recurrent.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")},
    Attention: ALL,
    Several: ALL,
    Unused: ALL,
}
"""What I leaves to W; where it leaves a weight, no hook and no code of the user's stands in the way."""


@pytest.fixture(autouse=True)
def _events() -> Iterator[None]:
    yield
    EVENTS.clear()


@pytest.mark.parametrize("first_learns", [True, False], ids=["", "no input gradient"])
@pytest.mark.parametrize("middle", LEFT, ids=lambda one: one.__name__)
def test_both_halves_are_the_whole(middle: type[Middle], first_learns: bool) -> None:
    whole = Run(middle, WHOLE, first_learns=first_learns)
    split = Run(middle, SPLIT, first_learns=first_learns)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(split.losses, whole.losses, strict=True))
    for name, gradient in whole.gradients.items():
        ours = split.gradients[name]
        assert (ours is None) == (gradient is None), name
        assert gradient is None or torch.equal(ours, gradient), f"{name}: {ours} instead of {gradient}"
    assert any(gradient is not None for gradient in whole.gradients.values())
    assert split.counts == whole.counts, "one accumulation for each micro-batch"
    assert split.events == whole.events, "the user's code runs as often as in a whole backward, and sees the same"
    if not first_learns and middle is not Reentrant:  # which warns: no gradient leaves it
        assert split.left == {name for name, p in split.middle.named_parameters() if p.requires_grad}
    elif first_learns:
        assert split.left == LEFT[middle]


@pytest.mark.parametrize("middle", LEFT, ids=lambda one: one.__name__)
def test_both_halves_of_what_is_computed_again(middle: type[Middle]) -> None:
    """RECOMPUTE makes a graph as F does, so that it can be split like any other."""
    whole, split = Run(middle, WHOLE), Run(middle, SPLIT, recompute=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(split.losses, whole.losses, strict=True))
    for name, gradient in whole.gradients.items():
        ours = split.gradients[name]
        assert (ours is None) == (gradient is None), name
        assert gradient is None or torch.equal(ours, gradient), f"{name}: {ours} instead of {gradient}"
    assert split.counts == whole.counts
    assert split.left == LEFT[middle]


class Saves(torch.autograd.Function):
    """Saves a tensor of its own for its backward."""

    memory: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        memory = np.zeros(1)
        Saves.memory.append(weakref.ref(memory))
        ctx.save_for_backward(torch.from_numpy(memory))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SavesBoth(Middle):
    """First a node on the way to the input, then one on the way to a weight."""

    alive: ClassVar[list[list[bool]]] = []

    def forward(self, x: Tensor) -> list[Tensor]:
        SavesBoth.alive.append([memory() is not None for memory in Saves.memory])
        return [functional.linear(Saves.apply(self.norm(x)), Saves.apply(self.linear.weight))]


def test_memory_goes_as_soon_as_its_half_has_run() -> None:
    Saves.memory.clear()
    SavesBoth.alive.clear()
    run = Run(SavesBoth, SPLIT)
    assert SavesBoth.alive == [[], [False, True]], "after I what only I needed is gone"
    assert [memory() for memory in Saves.memory] == [None] * 4, "after W everything, without the garbage collector"
    assert run.losses


def test_an_error_in_either_half_is_the_callers_and_leaves_nothing() -> None:
    class Breaks(Middle):
        where = "x"

        def forward(self, x: Tensor) -> list[Tensor]:
            broken = Broken.apply(x if self.where == "x" else self.linear.weight)
            return [functional.linear(broken, self.linear.weight) if self.where == "x" else x @ broken]

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("this backward breaks")

    class BreaksW(Breaks):
        where = "weight"

    for middle in (Breaks, BreaksW):
        with pytest.raises(ArithmeticError, match="this backward breaks"):
            Run(middle, SPLIT)
