"""SequenceLength: of which forward a part is, also where backward runs an activation checkpoint again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fold3d.errors import Fold3dError
from fold3d.tensor_parallel.sequence import SequenceLength

LENGTHS = (7, 8)
"""Of both the first of two ranks has four rows."""


def seen_again(reentrant: bool, says_what: bool) -> list[int]:
    """Returns what each of two checkpoints, whose forwards came before both backwards, is told when it runs again."""
    length, seen = SequenceLength(2, 0), list[int]()

    def block(x: Tensor) -> Tensor:
        seen.append(length.of(4, given=x if says_what else None))
        return x * x

    results = []
    for whole in LENGTHS:
        length.begin(whole)
        results.append(checkpoint(block, torch.randn(2, 4, 3, requires_grad=True), use_reentrant=reentrant))
    assert seen == list(LENGTHS)
    for result in results:
        result.sum().backward()
    return seen[len(LENGTHS) :]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_again_with_its_own_length(reentrant: bool) -> None:
    assert seen_again(reentrant, says_what=True) == list(LENGTHS)


def test_where_nothing_tells_them_apart_it_is_said() -> None:
    with pytest.raises(Fold3dError, match="use_reentrant=False"):
        seen_again(reentrant=True, says_what=False)


def test_a_block_before_the_first_one() -> None:
    with pytest.raises(Fold3dError, match="before the first one"):
        SequenceLength(2, 0).of(4)
