"""DP.sync of parameters that are not contiguous or have no dimensions; going back to an earlier state."""

from __future__ import annotations

import pytest
import torch

from tests.dist import dp_sync_layouts as layouts
from tests.dist.test_dp_sync_loops import WAYS, assert_close
from tests.helpers.ranks import RankPool

ALL_WAYS = (*WAYS, "serial")


@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
def test_like_one_process_whatever_the_layout(ranks: RankPool, optimizer: str) -> None:
    """Fused optimizers go through memory as it lies: gradients must lie as their parameters do."""
    expected = layouts.alone(optimizer, torch.float64)
    for dp_sync in ALL_WAYS:
        for found in ranks.run(layouts.train, 2, dp_sync, optimizer, torch.float64):
            assert_close(found, expected)


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_in_every_way_whatever_the_layout(ranks: RankPool, optimizer: str, dtype: torch.dtype) -> None:
    first = ranks.run(layouts.train, 2, "serial", optimizer, dtype)[0]
    for dp_sync in WAYS:
        for found in ranks.run(layouts.train, 2, dp_sync, optimizer, dtype):
            assert all(torch.equal(found[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("dp_sync", ALL_WAYS)
@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
def test_going_back_to_an_earlier_state(ranks: RankPool, optimizer: str, dp_sync: str) -> None:
    """With a bucket for each parameter, and with one for all, where a number lies beside tensors."""
    for bucket_bytes in (0, 1 << 20):
        _assert_same(ranks.run(layouts.go_back, 2, dp_sync, optimizer, bucket_bytes))


def _assert_same(results: list[tuple[dict[str, torch.Tensor], ...]]) -> None:
    for expected, *others in results:
        for found in others:
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("dp", "dp_sync"), [(1, "auto"), (2, "early"), (2, "zero1"), (2, "serial")])
def test_stages_of_different_dtypes_agree_on_the_norm(ranks: RankPool, dp: int, dp_sync: str) -> None:
    """Or they would clip differently, and one would take a step that the other skips."""
    first, *others = ranks.run(layouts.norms, 2 * dp, dp, dp_sync)
    assert len(first) == 3
    assert all(norm.dtype == torch.float64 for norm in first)
    for found in others:
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, first, strict=True))
