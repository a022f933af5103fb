"""Stashes that leave the device come back as they were: to the bit what is computed without, and the device's share of
them does not grow with the number of micro-batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fold3d
from fold3d import _C
from fold3d.device import is_accelerator, synchronize
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.helpers import device
from tests.helpers.models import Squares, returned_loss
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

CASES = [
    Case(pp=2, segments=2, m=4, schedule="aiao", dtype="float32", dropout=0.1),
    Case(pp=2, segments=2, m=5, schedule="aiao", dtype="bfloat16", family="llama", tied=False, dropout=0.1),
    Case(dp=2, pp=2, segments=2, m=6, schedule="aiao", recompute=True, dropout=0.1, labels="padded"),
    Case(pp=2, m=8, schedule="zb_h1", family="opt", tied=False),
    Case(segments=3, m=4, schedule="aiao", family="plain", layers=6, frozen=True),
    Case(segments=2, m=4, schedule="aiao", through="trainer", recompute=True),
    Case(pp=2, segments=4, m=6, schedule="aiao", layers=8, dropout=0.1),
    Case(segments=4, m=6, schedule="aiao", dtype="float32", recompute=True, dropout=0.1),
    Case(pp=2, segments=4, m=6, schedule="aiao", family="plain", layers=8, transport="c10d"),
]


@dataclass
class Trained:
    """Of one rank."""

    losses: list[float]
    digests: list[dict[str, str]]
    moved: int
    """Bytes that left in the last step."""
    device: int
    """The most bytes of moving stashes on the device."""
    pool: int
    largest: int
    """Bytes of the largest stash that left: they differ, the last segment has the loss."""


def train(case: Case) -> Trained:
    """Trains on one rank through the engine."""
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case)
        trained = Trained([], [], 0, 0, 0, 0)
        for step in range(2):
            out = engine.step(parity_jobs.batch_of(engine, case, step))
            trained.losses.append(out.loss.item())
            trained.digests.append(parity_jobs.digests(engine))
        account = engine.breakdown()
        trained.moved, trained.device, trained.pool = (
            account.offload_bytes,
            account.stashes_peak_bytes,
            account.pool_peak_bytes,
        )
        left = [size for lane, _, _, _, size in account.records if lane == "offload"]
        trained.largest = max(left, default=0)
        came = [record for record in account.records if record[0] == "prefetch"]
        # A message that lands in the pool comes to the device without having left one.
        came_back = sum(size for _, action, _, _, size in came if "PREFETCH_" not in action)
        assert came_back <= trained.moved and (came if trained.moved else not came_back)
        assert not came or case.offload != "none"
        engine.close()
        return trained


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_to_the_bit(ranks: RankPool, case: Case) -> None:
    if case.through == "trainer":
        off, on = (
            ranks.run(parity_jobs.train, case.ranks, replace(case, offload=how))[0] for how in ("none", "activations")
        )
        assert on.losses == off.losses and on.norms == off.norms
        assert all(torch.equal(on.weights[name], off.weights[name]) for name in off.weights)
        return
    off, on = (ranks.run(train, case.ranks, replace(case, offload=how)) for how in ("none", "activations"))
    for without, with_pool in zip(off, on, strict=True):
        assert with_pool.losses == without.losses
        assert with_pool.digests == without.digests
        assert without.moved == 0
    assert any(one.moved > 0 and one.pool > 0 for one in on)  # the last stage of 1F1B turns around at once


@pytest.mark.gate
def test_what_is_on_the_device_does_not_grow_with_the_micro_batches(ranks: RankPool) -> None:
    """AIAO keeps segments * m stashes: they are in the pool, the device has those that come and go.

    How many that are at once depends on how fast copies are: two that leave, one more that waits to, two that come, and
    one in use at most.
    """
    case = Case(pp=2, segments=4, m=8, schedule="aiao", layers=8, offload="activations")
    few, many = (ranks.run(train, 2, replace(case, m=m)) for m in (8, 24))
    for one, more in zip(few, many, strict=True):
        assert 0 < max(one.device, more.device) <= 6 * one.largest
        assert more.pool > 2.5 * one.pool


def test_memory_is_given_back_when_it_is_copied(ranks: RankPool) -> None:
    """Not only counted: torch's allocator says so, of all that is on the device: what graphs save, and what one segment
    returned and the next has not taken."""
    few, many = (ranks.run(most_alive, 1, m, "activations")[0] for m in (8, 24))
    # However fast copies are: stashes of two layers (two that leave, one that waits to, two that come, one in use), as
    # many messages.
    # A device comes to what the host has launched later, up to two more stashes on either way, with their copies.
    assert max(few, many) <= (6 * 2 + 6 + 4) * (1 if device.chosen() == "cpu" else 2)
    without = [ranks.run(most_alive, 1, m, "none")[0] for m in (8, 24)]
    assert without[1] - without[0] >= 4 * 16


def most_alive(micro_batches: int, offload: str) -> int:
    """Returns how many tensors as large as an activation lived at once in a step, by the allocator's own account."""
    config = fold3d.ParallelConfig(
        segments=2, micro_batches=micro_batches, schedule="aiao", blocks="layers", offload=offload
    )
    torch.manual_seed(0)
    engine = fold3d.Engine(Squares(), config, example={"x": torch.randn(256, 16)})
    batches = [{"x": torch.randn(256, 16).to(engine.device)} for _ in range(micro_batches)]
    engine.run(batches, returned_loss)
    most = _most_bytes(engine.device, lambda: engine.run(batches, returned_loss))
    engine.close()
    return most // 2**14


def _most_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Returns by how much more than before was in use at once while it ran."""
    if is_accelerator(device):
        synchronize(device)
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before
    if not _C.count_cpu_bytes(True):
        pytest.skip("another allocator is in the place of torch's own")
    before = _C.live_cpu_bytes()
    _C.reset_peak_cpu_bytes()
    run()
    most = _C.peak_cpu_bytes() - before
    _C.count_cpu_bytes(False)
    return most


@pytest.mark.gate
def test_a_pool_that_is_too_small_is_an_error_on_every_rank(ranks: RankPool) -> None:
    """Before training, where the first micro-batch says so."""
    case = Case(pp=2, segments=2, m=4, schedule="aiao", offload="activations")
    for text in ranks.run(failing, 2, case, 8192):
        assert "offload_pool=8192: stage" in text and "with micro-batches like the first; raise it" in text


def failing(case: Case, pool: int) -> str:
    """Returns what the step says with a pool of so many bytes."""
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case, offload_pool=pool)
        try:
            engine.step(parity_jobs.batch_of(engine, case, 0))
        except fold3d.Fold3dError as error:
            return str(error)
        finally:
            engine.close()
    return "nothing"


SHARED = [
    Case(tp=2, segments=2, m=4, schedule="aiao", family="gpt2-96", tp_overlap="none", sequence_parallel=False),
    Case(tp=2, pp=2, segments=2, m=4, schedule="aiao", family="llama-96", tied=False, sequence_parallel=True),
    Case(tp=2, segments=2, m=4, schedule="aiao", family="gpt2-96", tp_overlap="sub", recompute="blocks"),
]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_a_pool_that_shards_cannot_do_with_is_refused_before_training(ranks: RankPool, case: Case) -> None:
    """What a rank of a tensor-parallel group has a part of is followed: as much is proven as it needs, or less."""
    case = replace(case, offload="activations", dtype="float32")
    needed = max(one.pool for one in ranks.run(train, case.ranks, case))
    for text in ranks.run(refused, case.ranks, case, 2048):
        found = re.search(r"offload_pool=2048: stage \d puts at least ([\d.]+) (k|M)B there", text)
        assert found, text
        proven = float(found[1]) * (1e3 if found[2] == "k" else 1e6)
        least = 0.4 if case.recompute else 0.6  # sums that are kept for a recomputation are not counted
        assert least * needed <= proven <= 1.01 * needed, (proven, needed)  # the text is rounded up


def refused(case: Case, pool: int) -> str:
    """Returns what building the engine says with a pool of so many bytes, where a micro-batch is known."""
    with parity_jobs.precision(case):
        batch = parity_jobs.replica_batch(case, 0, 0)
        rows = len(batch["input_ids"]) // case.m
        example = {name: value[:rows] for name, value in batch.items()}
        try:
            fold3d.Engine(parity_jobs.build(case), parity_jobs.config_of(case, offload_pool=pool), example=example)
        except fold3d.ConfigError as error:
            return str(error)
    return "nothing"


def test_a_pool_beyond_the_host_and_a_missing_folder_are_refused(tmp_path: Any) -> None:
    model = Squares()
    common: dict[str, Any] = {"segments": 2, "micro_batches": 2, "blocks": "layers", "offload": "activations"}
    example = {"x": torch.randn(4, 16)}
    with pytest.raises(fold3d.ConfigError, match="lower it, or set offload_disk"):
        fold3d.Engine(model, fold3d.ParallelConfig(**common, offload_pool="900TB"), example=example)
    with pytest.raises(fold3d.ConfigError, match="must be a folder"):
        config = fold3d.ParallelConfig(**common, offload_disk=str(tmp_path / "nowhere"))
        fold3d.Engine(model, config, example=example)


@pytest.mark.parametrize("setting", [{"offload_pool": "1GB"}, {"offload_disk": "."}], ids=lambda one: next(iter(one)))
def test_a_pool_that_nothing_will_lie_in_is_refused(setting: dict[str, Any]) -> None:
    config = fold3d.ParallelConfig(segments=2, micro_batches=2, blocks="layers", **setting)
    with pytest.raises(fold3d.ConfigError, match=f"{next(iter(setting))}=.* has no effect.*memory_limit"):
        fold3d.Engine(Squares(), config, example={"x": torch.randn(4, 16)})


@pytest.mark.parametrize("pp", [1, 2])
def test_a_file_is_a_pool_too_and_what_a_pool_needed_suffices(ranks: RankPool, tmp_path: Any, pp: int) -> None:
    """Also for messages between segments, which land there; pieces of different sizes leave gaps."""
    case = Case(pp=pp, segments=3, m=5, layers=7, schedule="aiao", dtype="float32")
    off = ranks.run(train, pp, case)
    on = ranks.run(train_on_disk, pp, replace(case, offload="activations"), str(tmp_path))
    assert [digests for digests, _ in on] == [one.digests for one in off]
    assert not list(tmp_path.iterdir())
    needed = max(pool for _, pool in on)
    for folder in (None, str(tmp_path)):
        exact = ranks.run(train_on_disk, pp, replace(case, offload="activations"), folder, needed)
        assert [digests for digests, _ in exact] == [one.digests for one in off]


def train_on_disk(case: Case, folder: str | None, pool: int | str = "auto") -> tuple[list[dict[str, str]], int]:
    """Returns the digests of two steps with a file for a pool, and the most bytes in it."""
    engine = parity_jobs.engine_of(case, offload_disk=folder, offload_pool=pool)
    found = []
    most = 0
    for step in range(2):
        engine.step(parity_jobs.batch_of(engine, case, step))
        found.append(parity_jobs.digests(engine))
        most = max(most, engine.breakdown().pool_peak_bytes)
    account = engine.breakdown()
    assert account.offload_bytes > 0
    assert case.pp == 1 or any("PREFETCH_" in record[1] for record in account.records)
    engine.close()
    return found, most


class Penalty(nn.Module):
    """A number goes from layer to layer beside the activations, as mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x = torch.tanh(layer(x))
            total = total + x.mean()
        return x.square().mean() + total


def test_numbers_cross_borders_too() -> None:
    found = {}
    for offload in ("none", "activations"):
        torch.manual_seed(0)
        model = Penalty()
        config = fold3d.ParallelConfig(segments=2, micro_batches=5, schedule="aiao", blocks="layers", offload=offload)
        batches = [{"x": torch.randn(64, 16)} for _ in range(5)]
        engine = fold3d.Engine(model, config, example=batches[0])
        engine.run(batches, returned_loss)
        assert (engine.breakdown().offload_bytes > 0) == (offload != "none")
        engine.close()
        found[offload] = [parameter.grad for parameter in model.parameters()]
    for mine, wanted in zip(found["activations"], found["none"], strict=True):
        assert mine is not None and wanted is not None and torch.equal(mine, wanted)


class Pixels(nn.Module):
    """Convolutions that say how the gradients lay that came back to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4))
        self.strides: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if torch.is_grad_enabled():
                x.register_hook(lambda gradient: self.strides.append(gradient.stride()))
        return x.square().mean()


def test_gradients_lie_as_they_do_without() -> None:
    found = {}
    for offload in ("none", "activations"):
        torch.manual_seed(0)
        model = Pixels().to(memory_format=torch.channels_last)
        config = fold3d.ParallelConfig(segments=4, micro_batches=4, schedule="aiao", blocks="layers", offload=offload)
        batches = [{"x": torch.randn(2, 8, 12, 12).to(memory_format=torch.channels_last)} for _ in range(4)]
        engine = fold3d.Engine(model, config, example=batches[0])
        model.strides.clear()
        engine.run(batches, returned_loss)
        assert (engine.breakdown().offload_bytes > 0) == (offload != "none")
        engine.close()
        found[offload] = model.strides
    assert found["activations"] == found["none"]
    assert (1152, 1, 96, 8) in found["none"]  # channels last


def test_hooks_of_the_user_inside_of_ours_and_writing_into_what_was_saved() -> None:
    batch = _C.StashBatch()
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(batch.save, _C.unpack_saved):
        y = x * 2
        z = (y * y).sum()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 0, lambda t: t):
            z = z + (y * y).sum()
    z.backward()
    assert x.grad is not None and torch.equal(x.grad, 16 * x.detach())
    with torch.autograd.graph.saved_tensors_hooks(batch.save, _C.unpack_saved):
        y = x * 2
        z = (y * y).sum()
        y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
