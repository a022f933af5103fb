"""What runs on CUDA gives the numbers of one process there, and the same bits in every way of DP.sync.

Each test runs once more on the CPU, so that what few machines run keeps working: over torch's groups there, too.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fold3d import _C
from fold3d.comms.shared_gloo import new_group
from fold3d.device import default_device, make_current
from tests.dist import dp_sync_jobs, parity_jobs
from tests.dist.parity_cases import STEPS, Case
from tests.dist.parity_checks import TOLERANCE, assert_all_names, assert_equal, assert_ranks_agree, assert_same_bits
from tests.helpers.ranks import RankPool

ONE = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TWO = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda(2))]
DP = Case(dp=2, m=2, segments=2, schedule="aiao", transport="c10d")
PP = Case(pp=2, m=3, segments=2, schedule="aiao", transport="c10d")
"""In fp64, for which torch has no attention kernels whose sums depend on timing."""


@pytest.fixture
def pool(request: pytest.FixtureRequest, device: str) -> RankPool:
    """Ranks that take `device`; the fixture is asked for by name, for the other pool must not start."""
    found = request.getfixturevalue("ranks" if device == "cpu" else "cuda_ranks")
    assert isinstance(found, RankPool)
    return found


def on_device(device: str) -> None:
    assert default_device().type == device


# One process


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu(), rtol=1e-10, atol=1e-10)


def beside_torch(case: Case, device: str) -> None:
    """Trains the case with an engine and, beside it on the same device, in a loop of plain torch."""
    on_device(device)
    with parity_jobs.precision(case):
        _beside_torch(case)


def _beside_torch(case: Case) -> None:
    engine = parity_jobs.engine_of(case)
    model = parity_jobs.build(case).to(engine.device)
    optimizer = parity_jobs.optimizer_of(model)(list(model.parameters()))

    def loss_of(model: nn.Module, batch: parity_jobs.Batch) -> Tensor:
        output = model(**batch)
        return output if isinstance(output, Tensor) else output.loss

    def backward(step: int) -> tuple[Tensor, list[parity_jobs.Batch]]:
        rows = parity_jobs.micro_batches_of(case, parity_jobs.global_batch(case, step), 0)
        parts = [parity_jobs.on(engine.device, part) for part in rows]
        losses = [loss_of(model, part) / case.m for part in parts]
        torch.autograd.backward(losses)
        return torch.stack([loss.detach() for loss in losses]).sum(), parts

    for step in range(STEPS):
        batch = parity_jobs.batch_of(engine, case, step)
        with torch.no_grad():
            same(engine.evaluate(batch), loss_of(model, batch))
        loss, _ = backward(step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), parity_jobs.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        out = engine.step(batch)
        same(out.loss, loss)
        same(out.grad_norm, norm)
    state = engine.state_dict()
    moments = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert state["optimizer"].keys() == moments.keys()
    for name, parameter in model.named_parameters():
        assert state["model"][name].device.type == "cpu" and engine.owned[name].device == engine.device
        same(state["model"][name], parameter)
        for key, value in moments[name].items():
            same(state["optimizer"][name][key], value)
    _, parts = backward(STEPS)
    engine.run(parts, lambda model, batch: loss_of(model, batch) / case.m)
    same(engine.grad_norm(), nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
    engine.close()
    continued = parity_jobs.engine_of(case)
    if case.family == "plain":
        continued.evaluate(batch)  # a plain module is recorded with its first batch
    continued.load_state_dict(state)
    same(continued.step(parity_jobs.batch_of(continued, case, STEPS)).loss, backward(STEPS)[0])
    continued.close()


@pytest.mark.dist
@pytest.mark.parametrize("device", ONE)
@pytest.mark.parametrize("family", ["llama", "plain"])
def test_one_process(pool: RankPool, device: str, family: str) -> None:
    pool.run(beside_torch, 1, Case(m=2, segments=2, schedule="aiao", family=family, tied=False), device)


# Two


def train(case: Case, device: str) -> parity_jobs.Result:
    on_device(device)
    return parity_jobs.train(case)


@pytest.mark.dist
@pytest.mark.parametrize("device", TWO)
@pytest.mark.parametrize("case", [DP, PP], ids=["dp2", "pp2"])
def test_two_processes(pool: RankPool, device: str, case: Case) -> None:
    alone = pool.run(train, 1, case.alone(), device)[0]
    first = None
    for dp_sync in ("early", "zero1", "serial") if case.dp > 1 else ("auto",):
        results = pool.run(train, 2, replace(case, dp_sync=dp_sync), device, timeout=150.0)
        assert_equal(results[0], alone, TOLERANCE[case.dtype])
        assert_all_names(results[0], parity_jobs.build(case))
        assert_ranks_agree(results, case)
        first = first or results[0]
        assert_same_bits(results[0], first)


def cut_bucket(device: str, as_bfloat16: bool) -> bool:
    """Returns whether the sums and the gathered values of a bucket that travels in slices are right."""
    rank, length, slices = dist.get_rank(), 1000, 7
    on_device(device)
    here = make_current(default_device())
    groups = [new_group([0, 1], timedelta(seconds=60), here, gloo=False, own_thread=True) for _ in range(2)]
    sync = _C.BucketSync(
        *(rank, 2, _C.NicArbiter(), here, 60.0, f"replica {rank}"),
        slice_bytes=length // slices * (2 if as_bfloat16 else 4),
        reduce_group=groups[0].group_name,
        gather_group=groups[1].group_name,
        library=True,
        hosts=[0, 1],
    )
    places = torch.arange(2.0 * length, device=here) % 64
    bucket = places * (rank + 1)
    sync.begin(1, [])
    sync.reduce(0, bucket, 0.5, as_bfloat16=as_bfloat16)
    sync.wait_reduced(0)
    right = bucket.chunk(2)[rank].equal(1.5 * places.chunk(2)[rank])
    sync.gather(0, bucket, as_bfloat16=as_bfloat16)
    sync.wait_gathered(0)
    right = right and bucket.equal(1.5 * places)
    sync.close()
    return right


@pytest.mark.dist
@pytest.mark.parametrize("device", TWO)
@pytest.mark.parametrize("as_bfloat16", [False, True])
def test_buckets_in_slices(pool: RankPool, device: str, as_bfloat16: bool) -> None:
    assert pool.run(cut_bucket, 2, device, as_bfloat16) == [True, True]


@pytest.mark.dist
@pytest.mark.parametrize("device", TWO)
@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_weights_are_whole_where_they_are_read(pool: RankPool, device: str, dp_sync: str) -> None:
    for by_state_dict, by_flush, by_forward in pool.run(dp_sync_jobs.read_lazily, 2, replace(DP, dp_sync=dp_sync)):
        for name, tensor in by_flush.items():
            assert torch.equal(by_state_dict[name], tensor), name
            assert torch.equal(by_forward[name], tensor), name


@pytest.mark.dist
@pytest.mark.parametrize("device", TWO)
def test_an_infinity_on_one_replica_skips_the_step_on_both(pool: RankPool, device: str) -> None:
    case = replace(DP, dtype="float32", dp_sync="zero1")
    results = pool.run(dp_sync_jobs.train_with_infinity, 2, case, 1, 1, 1)
    for seen in results:
        assert [torch.isfinite(torch.tensor(norm)).item() for norm in seen.norms] == [True, False, True, True]
        assert seen.scales == [256.0, 128.0, 128.0, 128.0]
    for weights in zip(*(seen.weights for seen in results), strict=True):
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
