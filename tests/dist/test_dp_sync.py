"""DP.sync is exact whatever is hidden: infinities, memory, laziness, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist import dp_sync_jobs as jobs
from tests.dist.parity_cases import Case
from tests.helpers.ranks import RankPool

CASE = Case(dp=2, pp=2, segments=2, m=3, schedule="aiao", dtype="float32")
WAYS = ("early", "zero1", "serial")


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", WAYS)
@pytest.mark.parametrize(("bad_rank", "bad_chunk"), [(0, 0), (3, 3)])
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    ranks: RankPool, dp_sync: str, bad_rank: int, bad_chunk: int
) -> None:
    case = replace(CASE, dp_sync=dp_sync)
    results = ranks.run(jobs.train_with_infinity, 4, case, bad_rank, bad_chunk, 1, timeout=150.0)
    for seen in results:
        assert seen.norms == results[0].norms
        assert [torch.isfinite(torch.tensor(norm)).item() for norm in seen.norms] == [True, False, True, True]
        assert seen.scales == [256.0, 128.0, 128.0, 128.0]
        for step in range(jobs.STEPS):
            before, after = seen.weights[step], seen.weights[step + 1]
            same = all(torch.equal(before[name], after[name]) for name in before)
            assert same == (step == 1)
    for stage in (0, 1):  # replicas stay the same bits
        for a, b in zip(results[stage].weights, results[2 + stage].weights, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp", [2, 4])
def test_zero1_keeps_its_share_of_the_optimizer(ranks: RankPool, dp: int) -> None:
    case = Case(dp=dp, m=2, segments=2, schedule="aiao", dtype="float32", family="llama", tied=False)
    whole = ranks.run(jobs.optimizer_bytes, dp, replace(case, dp_sync="early"))
    parts = ranks.run(jobs.optimizer_bytes, dp, replace(case, dp_sync="zero1"))
    assert all(state == parameters for state, parameters in whole)
    assert sum(state for state, _ in parts) == whole[0][0]
    assert max(state for state, _ in parts) <= 1.1 * whole[0][0] / dp


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", WAYS)
def test_whoever_reads_weights_gets_them_whole(ranks: RankPool, dp_sync: str) -> None:
    for by_state_dict, by_flush, by_forward in ranks.run(jobs.read_lazily, 4, replace(CASE, dp_sync=dp_sync)):
        for name, tensor in by_flush.items():
            assert torch.equal(by_state_dict[name], tensor), name
            assert torch.equal(by_forward[name], tensor), name


@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_an_engine_that_is_closed_leaves_final_weights(ranks: RankPool, dp_sync: str) -> None:
    for flushed, closed in ranks.run(jobs.close_at_once, 4, replace(CASE, dp_sync=dp_sync)):
        assert all(torch.equal(closed[name], tensor) for name, tensor in flushed.items())


@pytest.mark.gate
def test_sums_begin_under_the_backward(ranks: RankPool) -> None:
    for hidden, total in ranks.run(jobs.overlap, 4, replace(CASE, dp_sync="early"), holds=True):
        assert total >= 4 and hidden >= 1
    for hidden, total in ranks.run(jobs.overlap, 4, replace(CASE, dp_sync="serial"), holds=False):
        assert total >= 4 and hidden == 0


def test_zero1_refuses_optimizers_that_look_at_whole_tensors(ranks: RankPool) -> None:
    for text in ranks.run(jobs.refuse, 2, Case(dp=2, dp_sync="zero1")):
        assert "RowNorm gives other numbers" in text and 'dp_sync="early"' in text
