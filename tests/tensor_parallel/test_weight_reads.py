"""What a block did not use when it was divided may be used later where every rank has the whole, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.stacks import loss_of, made

WIDTH = 8


class Block(nn.Module):
    """A feed-forward network with things that a batch can switch on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.rand(4 * WIDTH))
        self.inside, self.behind = nn.Linear(4 * WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, switched_on: bool) -> Tensor:
        h = self.up(x).relu()
        if switched_on and self.kind == "gate":
            h = h * self.gate
        if switched_on and self.kind == "scale":
            h = h * self.scale
        if switched_on and self.kind == "inside":
            h = h + self.inside(h)
        y = self.down(h)
        if switched_on and self.kind == "behind":
            y = y + self.behind(y)
        return x + y


def train(kind: str, on: list[bool], shares_sequence: bool) -> str:
    """Returns the error of the first step that has one; "" if all gradients of whole weights are one process's."""
    model, reference = made(lambda: Block(kind)), made(lambda: Block(kind))
    engine = Engine(model, ParallelConfig(tp=2, blocks="layers", sequence_parallel=shares_sequence))
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        for switched_on in on:
            batch = {"x": x, "switched_on": switched_on}
            for one in (model, reference):
                one.zero_grad()
            engine.run([dict(batch)], loss_of, reads_gradients=True)
            loss_of(reference, batch).backward()  # type: ignore[no-untyped-call]
            for name, parameter in reference.named_parameters():
                found = model.get_parameter(name).grad
                if parameter.grad is not None and found is not None and found.shape == parameter.shape:
                    torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14, msg=name)
    except Exception as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("shares_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("kind", ["gate", "scale", "behind"])
def test_is_used_from_the_beginning(ranks: RankPool, kind: str, shares_sequence: bool) -> None:
    assert ranks.run(train, 2, kind, [True, False, True], shares_sequence) == ["", ""]


@pytest.mark.parametrize(
    ("kind", "shares_sequence", "what"),
    [
        ("gate", False, "its parameter 'gate' is read"),
        ("scale", False, "its parameter 'scale' is read"),
        ("inside", False, "its module 'inside' runs"),
        ("behind", False, ""),
        ("behind", True, "its module 'behind' runs"),
    ],
)
def test_is_switched_on_later(ranks: RankPool, kind: str, shares_sequence: bool, what: str) -> None:
    for error in ranks.run(train, 2, kind, [False, True], shares_sequence):
        assert what in error and bool(error) == bool(what)
