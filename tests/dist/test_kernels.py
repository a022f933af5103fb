"""Training with fold3d's kernels has the numbers of torch's; and what they cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import fold3d
from fold3d import _C
from fold3d.data_parallel.optimizer import bucket_optimizer
from tests.dist import parity_jobs
from tests.dist.parity_cases import STEPS, Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_ranks_agree, assert_same_bits
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

CASES = [
    Case(dp=2, pp=2, m=3, segments=2, schedule="aiao", dtype="float32", dp_sync="zero1", tied=False),
    Case(dp=2, pp=2, m=3, segments=2, schedule="aiao", dp_sync="early", frozen=True),
    Case(dp=2, tp=2, m=2, dp_sync="zero1", tp_overlap="none"),
    Case(dp=3, m=2, dtype="float32", dp_sync="serial", through="trainer"),
    Case(m=2, dtype="float32", offload_optimizer=True),
    Case(pp=2, m=2, through="trainer"),
]


def train(case: Case) -> tuple[parity_jobs.Result, int, int]:
    """Also returns how often the kernels stepped and measured."""
    squares, step = torch.ops.fold3d.squares, bucket_optimizer.step_by_kernel
    calls = {"step": 0, "squares": 0}

    def stepped(*given: Any) -> None:
        calls["step"] += 1
        step(*given)

    def measured(*given: Any) -> None:
        calls["squares"] += 1
        squares(*given)

    with (
        mock.patch.object(bucket_optimizer, "step_by_kernel", stepped),
        mock.patch.object(torch.ops.fold3d, "squares", measured),
    ):
        return parity_jobs.train(case), calls["step"], calls["squares"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_numbers_are_those_of_one_process(ranks: RankPool, case: Case) -> None:
    alone = ranks.run(parity_jobs.train, 1, case.alone())[0]
    found = ranks.run(train, case.ranks, replace(case, kernels="fold3d"))
    results = [result for result, *_ in found]
    assert_equal(results[0], alone, TOLERANCE[case.dtype])
    assert_ranks_agree(results, case)
    steps_by_itself = case.dp > 1 or case.offload_optimizer
    for _, stepped, measured in found:
        assert measured >= STEPS and (stepped >= STEPS) == steps_by_itself
    for _, stepped, measured in ranks.run(train, case.ranks, case):
        assert (stepped, measured) == (0, 0)


def test_zero1_and_early_have_the_same_bits(ranks: RankPool) -> None:
    case = Case(dp=2, m=2, dtype="float32", kernels="fold3d")
    early, zero1 = (
        ranks.run(parity_jobs.train, 2, replace(case, dp_sync=way, clip=False))[0] for way in ("early", "zero1")
    )
    assert_same_bits(zero1, early)


class Mean(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).mean()


def refused() -> tuple[str, str]:
    texts = []
    for kernels, optimizer, device in (("fold3d", torch.optim.SGD, True), ("fold3d", torch.optim.AdamW, False)):
        config = fold3d.ParallelConfig(dp=2, segments=1, kernels=kernels)
        with (
            mock.patch.object(_C, "has_kernels", lambda where, has=device: has),
            pytest.raises(fold3d.Fold3dError) as caught,
        ):
            model = Mean(3, 3)
            engine = fold3d.Engine(model, config, optimizer=lambda given, make=optimizer: make(given, lr=0.1))
            engine.step({"input": torch.ones(2, 3)})
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_refused(ranks: RankPool) -> None:
    for other, without in ranks.run(refused, 2):
        assert 'kernels="fold3d" steps AdamW, and the optimizer is SGD' in other
        assert "this build has no kernels for cpu" in without and 'set kernels="torch"' in without
    with pytest.raises(fold3d.ConfigError, match="kernels='cuda': must be one of torch, fold3d"):
        fold3d.ParallelConfig(kernels="cuda")
