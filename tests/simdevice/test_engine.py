"""The Engine runs on the simulated device: the CPU's bits, no race."""

from __future__ import annotations

from tests.helpers.ranks import RankPool


def test_one_process_trains_with_the_bits_of_the_cpu(sim_ranks: RankPool) -> None:
    (launches,) = sim_ranks.run("tests.simdevice.engines:one_process", 1)
    assert launches > 500
