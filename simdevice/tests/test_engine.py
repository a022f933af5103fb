"""The Engine runs on the simulated device: the CPU's bits, no race."""

from __future__ import annotations

import re

from fold3d.config import text_of_bytes
from tests.helpers.ranks import RankPool


def test_one_process_trains_with_the_bits_of_the_cpu(sim_ranks: RankPool) -> None:
    (launches,) = sim_ranks.run("simdevice.tests.engines:one_process", 1)
    assert launches > 500


def test_running_out_of_its_memory_is_explained(sim_ranks: RankPool) -> None:
    ((text, cause, planned),) = sim_ranks.run("simdevice.tests.memory:out_of_memory", 1)
    assert cause == "OutOfMemoryError"
    assert "sim out of memory" in text and f"planned were {text_of_bytes(planned)}" in text, text
    assert "the cheapest ways to need less:" in text
    used = re.search(r"this rank had used ([\d.]+) kB at most", text)  # not what measuring the model has needed
    assert used and float(used[1]) < 1100, text


def test_its_memory_is_the_limit_where_none_is_set(sim_ranks: RankPool) -> None:
    (((whole, needed), (spared, less)),) = sim_ranks.run("simdevice.tests.memory:planned_for_the_device", 1)
    assert whole == "none, none" and needed > 110_000_000
    assert spared != "none, none" and less < 0.9 * 110_000_000
