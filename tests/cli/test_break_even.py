"""The closed form of DDP and HSDP beside a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fold3d.cli.rivals import rivals_of


def test_sums_are_exposed_beyond_the_last_backward() -> None:
    """100 MB on 8 processes at 100 MB/s; two micro-batches each."""
    whole: Any = SimpleNamespace(
        forward=(0.1, 0.2), backward=(0.3, 0.3), gradient_bytes={"a": 60_000_000, "b": 40_000_000}, update_seconds=1e-9
    )
    given = {"bandwidth": 1e8, "processes": 8, "micro_batches": 16}
    ddp, hsdp = rivals_of(whole, ranks_per_host=2, **given)
    assert (ddp.compute_ms, ddp.window_ms, ddp.sum_ms) == pytest.approx((1900, 600, 1750))
    assert (hsdp.compute_ms, hsdp.window_ms, hsdp.sum_ms) == pytest.approx((1850, 600, 750))
    assert (ddp.step_ms, hsdp.step_ms) == pytest.approx((3050, 2000))
    assert (
        "this plan takes 0.82 of that. It is ahead where the sums take more than 1200.0 ms (here 1750.0)"
        in ddp.against(2500)
    )
    assert "1.25 of that: take HSDP if the model fits" in hsdp.against(2500)
    assert [one.name for one in rivals_of(whole, ranks_per_host=None, **given)] == ["DDP"]
    assert [one.name for one in rivals_of(whole, ranks_per_host=8, **given)] == ["DDP"]
