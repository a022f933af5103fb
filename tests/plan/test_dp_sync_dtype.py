"""Gradients that travel as bfloat16 send half the bytes, and the simulator knows it."""

from __future__ import annotations

import pytest

from fold3d.cli.main import main
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.cluster_model import BucketCost, ClusterCosts, Work, cluster_model
from fold3d.plan.resolve import constraints_of
from fold3d.plan.search import search
from fold3d.plan.space import registry
from fold3d.plan.space.dp_sync import DTYPE
from fold3d.plan.strategy import parse
from tests.plan.jobs import make_job

WORK = Work(
    forward=(1.0, 1.0),
    backward=(2.0, 2.0),
    layers=(1, 2),
    activation_bytes=(8, 8),
    gradient_bytes=(400, 600),
    buckets=((BucketCost(1.0, 2.0, 400),), (BucketCost(0.5, 1.0, 200), BucketCost(0.5, 1.0, 400))),
)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("early", [[200], [100, 200]]),
        ("serial", [[200], [100, 200]]),
        ("zero1", [[300], [150, 300]]),  # half of the sums, and weights that are gathered whole
    ],
)
def test_bytes_of_buckets(way: str, expected: list[list[int]]) -> None:
    whole = cluster_model(WORK, ClusterCosts(dp=2, bandwidth=1.0), pp=2, dp_sync=way)
    half = cluster_model(WORK, ClusterCosts(dp=2, bandwidth=1.0, gradient_share=0.5), pp=2, dp_sync=way)
    assert [[bucket[2] for bucket in chunk] for chunk in whole.buckets] == [[400], [200, 400]]
    assert [[bucket[2] for bucket in chunk] for chunk in half.buckets] == expected
    assert half.gradient_bytes == [sum(chunk) for chunk in expected]


def test_mixed_ways_have_their_own() -> None:
    modes = (("early",), ("zero1", "early"))
    half = cluster_model(
        WORK, ClusterCosts(dp=2, bandwidth=1.0, gradient_share=0.5), pp=2, dp_sync="mixed", modes=modes
    )
    assert [[(bucket[2], bucket[3]) for bucket in chunk] for chunk in half.buckets] == [
        [(200, False)],
        [(150, True), (200, False)],
    ]


def test_the_planner_knows_it_and_never_chooses_it() -> None:
    job = make_job(bandwidth=4e6)  # the network is what a step waits for
    whole = search(job, registry.constrained(segments=4))
    half = search(job, registry.constrained(segments=4, dp_sync_dtype="bfloat16"))
    assert DTYPE.of(whole.strategy) == "float32" and DTYPE.of(half.strategy) == "bfloat16"
    assert half.step_ms < 0.75 * whole.step_ms
    assert "--dp_sync_dtype bfloat16" in registry.flags_of(half.strategy)
    assert "dp_sync_dtype" not in registry.flags_of(whole.strategy)
    assert parse(str(half.strategy)) == half.strategy


def test_what_the_user_says_is_fixed() -> None:
    constraints = constraints_of(ParallelConfig(dp=2, dp_sync_dtype="bfloat16"))
    assert DTYPE.fixed(constraints) == "bfloat16"
    with pytest.raises(ConfigError, match="dp_sync_dtype='fp8': must be one of float32, bfloat16"):
        registry.constrained(dp_sync_dtype="fp8")


def test_simulate_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "1f1b", "-p", "2", "-m", "4", "--forward", "1", "--gradients", "50", "--bandwidth", "1"]
    times = []
    for dtype in ("float32", "bfloat16"):
        assert main([*words, "--dp-sync-dtype", dtype]) == 0
        out = capsys.readouterr().out
        times.append(float(out.split("step ")[1].split(" ms")[0]))
    assert times[1] < 0.9 * times[0]
