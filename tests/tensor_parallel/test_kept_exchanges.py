"""KeptExchanges: which exchange of a checkpoint's code is which when backward runs it again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fold3d.tensor_parallel.kept_exchanges import KeptExchanges
from fold3d.tensor_parallel.turns import Turns


class Counted:
    """Exchanges that give another number each time."""

    def __init__(self) -> None:
        self.kept, self.made = KeptExchanges(Turns()), 0

    def __call__(self, x: Tensor) -> Tensor:
        def make(known: Tensor | None) -> Tensor:
            if known is None:
                self.made += 1
            return x * (torch.full_like(x, self.made) if known is None else known / x.detach())

        return self.kept.recall(make)


def test_what_was_exchanged_without_a_graph_is_exchanged_again() -> None:
    """It was not kept, and stands for no other one."""
    exchange, seen = Counted(), list[float]()

    def code(x: Tensor) -> Tensor:
        with torch.no_grad():
            exchange(x)
        y = exchange(x)
        seen.append(y.item())
        return y.sin() * x

    checkpoint(code, torch.ones(1, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [2.0, 2.0] and exchange.made == 3


def test_a_checkpoint_within_a_checkpoint() -> None:
    exchange, seen = Counted(), list[float]()

    def inner(x: Tensor) -> Tensor:
        for _ in range(2):
            x = exchange(x)
            seen.append(x.item())
            x = x.sin()
        return x

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, exchange(x).cos(), use_reentrant=False) * x

    x = torch.ones(1, requires_grad=True)
    checkpoint(outer, x, use_reentrant=False).sum().backward()
    # To find what the inner one was given, backward runs the outer one again, and within it another inner one.
    first, other, again = seen[:2], seen[2:4], seen[4:]
    assert again == first and other != first
