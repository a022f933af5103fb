"""Scenarios of the shaped cluster in other sizes."""

from __future__ import annotations

import pytest

from benchmarks.cluster.scenarios import SCENARIOS
from benchmarks.cluster.testbed.hosts import Link


def test_thinned_scenarios_keep_their_times() -> None:
    one, thin = SCENARIOS["B"], SCENARIOS["B"].thinned(2)
    assert (thin.dp_sync_s, thin.limit_s) == pytest.approx((one.dp_sync_s, one.limit_s))
    assert thin.gradient_bytes == one.gradient_bytes // 2 and thin.rate_mbit == one.rate_mbit / 2
    links = [Link(rate_mbit=rate) for rate in (100.0, 50.0)]
    assert [link.send_window for link in links] == ["4096 16384 65536", "4096 8192 32768"]
    assert [link.receive_window for link in links] == ["4096 65536 131072", "4096 32768 65536"]


def test_slowed_scenarios_keep_their_shares() -> None:
    one, slow = SCENARIOS["B"], SCENARIOS["B"].slowed(3)
    assert (slow.dp_sync_s, slow.limit_s) == pytest.approx((3 * one.dp_sync_s, 3 * one.limit_s))
    assert (slow.gradient_bytes, slow.activation_bytes) == (one.gradient_bytes, one.activation_bytes)
    assert SCENARIOS["O"].slowed(3).copies_per_forward == pytest.approx(SCENARIOS["O"].copies_per_forward)
