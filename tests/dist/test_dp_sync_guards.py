"""Sums begin bucket by bucket, what would make them wrong is refused by name, and memory decides how they gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import dp_sync_guards as jobs
from tests.helpers.ranks import RankPool


def test_a_layer_is_summed_while_the_layers_before_it_compute(ranks: RankPool) -> None:
    assert ranks.run(jobs.sum_under_the_backward, 2) == [1, 1]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_a_gradient_after_its_sum_has_begun(ranks: RankPool, dp_sync: str) -> None:
    for text in ranks.run(jobs.backward_of_one_s_own, 2, dp_sync):
        assert "got another gradient after its sum over the replicas had begun" in text, text


@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_a_weight_that_is_read_by_a_way_nobody_recorded(ranks: RankPool, dp_sync: str) -> None:
    for found, serial in zip(*(ranks.run(jobs.unrecorded_read, 2, way) for way in (dp_sync, "serial")), strict=True):
        for name, value in serial.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("frozen", "another parameter layers.1.linear.bias than rank 0"),
        ("frozen later", "another requires_grad of layers.1.linear.bias than rank 0: False on rank 1, and True there"),
        ("lr", "another lr of optimizer group 0 than rank 0: 0.2 on rank 1, and 0.1 there"),
    ],
)
def test_a_replica_that_does_otherwise(ranks: RankPool, what: str, text: str) -> None:
    for found in ranks.run(jobs.unlike, 2, what):
        assert text in found, found


@pytest.mark.parametrize(
    "settings", [{"dp_sync": "zero1"}, {"dp_sync": "early"}, {"pp": 2, "bucket_bytes": None}], ids=str
)
def test_a_run_before_the_optimizer_took_the_gradients_of_the_last(ranks: RankPool, settings: dict[str, Any]) -> None:
    for text, dropped, alone in ranks.run(jobs.run_again, 2, **settings):
        assert "nobody has taken those of the run before" in text and "optimizer.zero_grad()" in text, text
        assert all(torch.equal(dropped[name], tensor) for name, tensor in alone.items())


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        ("some parameters", {"dp": 2}),
        ("some parameters", {"pp": 2}),
        ("another steps", {"pp": 2}),
        ("zeroed", {"pp": 2}),
    ],
    ids=str,
)
def test_a_run_after_the_optimizers_gradients_were_dropped(ranks: RankPool, way: str, settings: dict[str, Any]) -> None:
    assert ranks.run(jobs.drop, 2, way, **settings) == ["", ""]


@pytest.mark.gate
def test_a_parameter_that_got_other_memory(ranks: RankPool) -> None:
    for text in ranks.run(jobs.other_memory, 2):
        assert "got other memory after the engine was built" in text, text


@pytest.mark.parametrize("segments", [2, "auto"])
def test_buckets_are_zero1_as_far_as_memory_asks_for_it(ranks: RankPool, segments: int | str) -> None:
    settings = {"pp": 2, "segments": segments, "schedule": "aiao", "recompute": "none", "offload": "none"}
    plenty = ranks.run(jobs.within, 4, 1 << 30, **settings)
    needs, ways, _ = plenty[0]
    assert ways == {"early"}
    tight = ranks.run(jobs.within, 4, needs * 9 // 10, **settings)
    for (less, now, weights), (_, _, same) in zip(tight, plenty, strict=True):
        assert less <= needs * 9 // 10 and "zero1" in now
        if segments != "auto":  # else other layers may be here
            assert all(torch.equal(weights[name], tensor) for name, tensor in same.items())


def test_memory_of_a_model_without_blocks_is_not_planned(ranks: RankPool) -> None:
    for text in ranks.run(jobs.without_blocks, 2):
        assert "memory_limit=1048576 cannot be kept" in text and 'dp_sync="zero1"' in text, text


@pytest.mark.parametrize("optimizer", ["Adam", "Adafactor"])
def test_no_engine_where_nothing_fits(ranks: RankPool, optimizer: str) -> None:
    """Adafactor looks at whole tensors, so zero1 is no way out."""
    for text in ranks.run(jobs.too_little, 4, optimizer):
        assert "B, the least that was found (2 segments, aiao, dp_sync" in text and "raise memory_limit" in text, text
        assert optimizer == "Adam" or "dp_sync early" in text, text
