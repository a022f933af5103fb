"""Operators of the simulated device compute what the CPU's do."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPool

GROUPS = (
    *("pointwise", "activations", "matrices", "normalisation", "losses", "reductions", "indexing"),
    *("views", "convolutions", "factories"),
)


@pytest.mark.parametrize("group", GROUPS)
def test_operators_compute_what_the_cpu_computes(group: str, sim_ranks: RankPool) -> None:
    ((compared, wrong),) = sim_ranks.run("simdevice.tests.conformance:check", 1, group, timeout=120)
    assert not wrong, f"{compared} samples agree, but\n" + "\n".join(wrong)
    assert compared > 20
