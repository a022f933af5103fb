"""RowsRandom: ranks that have parts of the sequence draw what one rank draws, in every shape that code gives it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import even_part
from fold3d.tensor_parallel.random_draws import RowsRandom

SAMPLES, LENGTH, WIDTH, RANKS = 2, 7, 3, 4


def chosen(x: Tensor) -> Tensor:
    return torch.bernoulli(x.abs() / (1 + x.abs()))


def exponential(x: Tensor) -> Tensor:
    return torch.empty_like(x).exponential_()


def whole_numbers(x: Tensor) -> Tensor:
    return torch.randint_like(x, 9)


@pytest.mark.parametrize(
    ("draw", "folded"),
    [
        *itertools.product((functional.dropout, torch.rand_like, chosen, exponential, whole_numbers), (False, True)),
        (functional.dropout1d, False),
    ],
)
def test_parts_are_those_of_the_whole(draw: Callable[[Tensor], Tensor], folded: bool) -> None:
    """Of 7 rows ranks have 2, 2, 2 and 1; samples and rows in two dimensions, or in one as around linear layers."""
    whole = torch.randn(SAMPLES, LENGTH, WIDTH)

    def drawn(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return draw(x.flatten(0, 1)).view(x.shape) if folded else draw(x)

    expected = drawn(whole)
    for rank in range(RANKS):
        first, end = even_part(LENGTH, RANKS, rank)
        part = whole[:, first:end]
        with RowsRandom(part.shape, 1, LENGTH, RANKS, rank, lambda: False) as mode:
            assert torch.equal(drawn(part), expected[:, first:end])
        assert mode.used


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
    "randint": lambda x: torch.randint(9, x.shape),
    "gumbel_softmax": functional.gumbel_softmax,
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_draws_are_refused(name: str) -> None:
    """Each rank drew for itself."""
    part = torch.randn(SAMPLES, 3, WIDTH)
    with RowsRandom(part.shape, 1, LENGTH, RANKS, 0, lambda: False):
        with pytest.raises(Fold3dError, match=f"it draws random numbers by {name}"):
            OTHERS[name](part)
        assert functional.alpha_dropout(part, 0.5, False) is not None, "draws nothing"


def test_rows_in_an_order_that_nobody_knows() -> None:
    part = torch.randn(SAMPLES, 3, WIDTH)
    with RowsRandom(part.shape, 1, LENGTH, RANKS, 0, lambda: False):
        assert functional.dropout(part[:, 0, 0]).shape == (SAMPLES,), "of samples, alike on all ranks"
        with pytest.raises(Fold3dError, match=r"of the size \(3, 2, 3\).*Set sequence_parallel=False"):
            functional.dropout(part.transpose(0, 1))
