"""How long layers take whose TP.sync is hidden: Merak's formula, and what no way of hiding can beat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold3d.errors import ConfigError
from fold3d.plan.space.tp_overlap import Region, even_regions, ring_seconds, seconds

times = st.floats(0.01, 10.0)


@given(st.integers(1, 8), times, times)
def test_meraks_formula(layers: int, compute: float, sync: float) -> None:
    """Section 5.3: a forward of K layers takes Tm / 4 + (K - 1/4) max(Tm, Ta) + Ta / 4."""
    found = seconds(even_regions(layers, compute, sync), "sub")
    assert found == pytest.approx(compute / 4 + (layers - 1 / 4) * max(compute, sync) + sync / 4)


@given(st.lists(st.builds(Region, times, times), min_size=1, max_size=12))
def test_bounds(regions: list[Region]) -> None:
    compute, sync = sum(region.compute for region in regions), sum(region.sync for region in regions)
    found = seconds(regions, "sub")
    assert max(compute, sync) <= found * (1 + 1e-9)
    assert found <= seconds(regions, "none") * (1 + 1e-9)
    assert seconds(regions, "none") == pytest.approx(compute + sync)


def test_nothing_to_hide() -> None:
    assert seconds(even_regions(3, 2.0, 0.0), "sub") == pytest.approx(6.0)


def test_ring() -> None:
    assert ring_seconds(1000, 2, 1000.0, 0.5) == pytest.approx(2 * (0.5 + 0.5))
    assert ring_seconds(1000, 1, 1000.0, 0.5) == 0.0


def test_another_way() -> None:
    with pytest.raises(ConfigError, match="sub, none"):
        seconds([], "threads")
