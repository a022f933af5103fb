"""Loops of one's own around an attached optimizer give what torch gives, or an error that says what to do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.dist import dp_sync_loops as loops
from tests.helpers.ranks import RankPool

WAYS = ("early", "zero1", "mixed")


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", WAYS)
@pytest.mark.parametrize(("loss", "norm"), [("share", False), ("scaled_share", False), ("share", True)])
def test_weights_are_never_read_too_early(ranks: RankPool, dp_sync: str, loss: str, norm: bool) -> None:
    """By the loss function, or by the model's own forward ahead of the module that holds them."""
    expected = loops.alone(3, getattr(loops, loss), norm)
    for found in ranks.run(loops.own_loop, 2, dp_sync, loss, norm):
        assert_close(found, expected)


@pytest.mark.parametrize("dp_sync", WAYS)
def test_gradients_that_are_read_in_some_steps(ranks: RankPool, dp_sync: str) -> None:
    """A layer that was updated in the forward of such a step kept the gradients of the step before."""
    expected = loops.alone(4)
    for found in ranks.run(loops.now_and_then_read, 2, dp_sync):
        assert_close(found, expected)


@pytest.mark.parametrize("dp_sync", WAYS)
def test_a_second_engine_of_the_model(ranks: RankPool, dp_sync: str) -> None:
    """Whose gradients are counted, and summed, by itself alone."""
    expected = loops.alone(2)
    for found in ranks.run(loops.with_two_engines, 2, dp_sync):
        assert_close(found, expected)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", WAYS)
def test_odd_calls_change_nothing(ranks: RankPool, dp_sync: str) -> None:
    expected = loops.alone(2)
    for found in ranks.run(loops.odd_calls, 2, dp_sync):
        assert_close(found, expected)


@pytest.mark.parametrize("dp_sync", WAYS)
def test_loaded_weights_stay(ranks: RankPool, dp_sync: str) -> None:
    initial = {name: p.detach() for name, p in loops.build().named_parameters()}
    for loaded, _ in ranks.run(loops.replaced, 2, dp_sync):
        assert_close(loaded, initial)


@pytest.mark.parametrize("dp_sync", WAYS)
def test_the_optimizer_moves_to_another_engine(ranks: RankPool, dp_sync: str) -> None:
    expected = loops.alone(4)
    for whole, moved in ranks.run(loops.reload_optimizer, 2, dp_sync):
        assert_close(whole, expected)
        assert_close(moved, expected)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, None), (torch.float16, None), (torch.float16, 2.0**17)], ids=str
)
def test_low_precision_has_the_same_bits_in_every_way(ranks: RankPool, dtype: torch.dtype, scale: float | None) -> None:
    first, scales = ranks.run(loops.low_precision, 2, "serial", dtype, scale)[0]
    if scale is not None:
        assert scales[0] < scale, "the first step must overflow"
        assert any(after > before for before, after in pairwise(scales)), "two steps in a row must be taken"
    initial = dict(loops.build(dtype=dtype).named_parameters())
    assert not any(torch.equal(first[name], tensor) for name, tensor in initial.items())
    for dp_sync in (*WAYS, "serial"):
        for found, its_scales in ranks.run(loops.low_precision, 2, dp_sync, dtype, scale):
            assert its_scales == scales
            assert all(torch.equal(found[name], tensor) for name, tensor in first.items())


def test_a_state_that_is_changed_counts(ranks: RankPool) -> None:
    found = {way: ranks.run(loops.change_state, 2, way)[0] for way in WAYS}
    plain = ranks.run(loops.reload_optimizer, 2, "early")[0][0]
    for name, tensor in found["early"].items():
        assert torch.equal(found["zero1"][name], tensor)
    assert not torch.equal(found["early"]["head.weight"], plain["head.weight"])


@pytest.mark.parametrize(
    ("what", "dp_sync", "says"),
    [
        ("own gradients", "early", "head.weight.grad was set between run and optimizer.step(); engine.clip_grad_norm"),
        ("late group", "early", "parameter group was added; new Engine"),
        ("moved", "early", "parameter group 0 has other parameters; settings of the group that it was in"),
        ("state", "zero1", "each replica keeps a part of the optimizer's state; engine.state_dict()"),
        ("values", "zero1", "each replica keeps a part of the optimizer's state; engine.whole_optimizer_state()"),
        ("replaced", "zero1", "the optimizer's `state` was replaced; engine.whole_optimizer_state()"),
        ("coupled", "early", "Coupled gives other numbers for parameters together; layers are stepped apart"),
        ("unfreeze", "early", "embedding.weight was frozen when the engine was built; new Engine or Trainer"),
    ],
)
def test_what_cannot_be_right_says_so(ranks: RankPool, what: str, dp_sync: str, says: str) -> None:
    for text in ranks.run(loops.misuse, 2, what, dp_sync):
        assert all(part in text for part in says.split("; ")), text
