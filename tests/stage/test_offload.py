"""A pool is proven, checked and reserved before anything is trained."""

from __future__ import annotations

import functools
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fold3d
from fold3d import _C
from fold3d.engine.planning import planner
from fold3d.plan.programs import Programs
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.profile.stashes import stashes_of
from fold3d.stage import offload
from tests.helpers.models import Squares, returned_loss

LAYERS = 8
COMMON: dict[str, Any] = {"segments": 2, "micro_batches": 6, "schedule": "aiao", "blocks": "layers"}
LEAVES = COMMON | {"offload": "activations"}


class Odd(nn.Module):
    """A block that saves what is no plain tensor of its own: views of one memory, a mask, a complex and a sparse
    tensor, what a checkpoint and hooks of its own keep."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.shift = nn.Buffer(torch.eye(width).roll(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, -1)
        x = x + left.t().sigmoid().t() * right.masked_fill(right > 1, 0.5)
        x = x + 0.1 * (left * right - right.cos() * left)  # saves both halves of one memory, in both orders
        spectrum = torch.fft.rfft(x)
        x = torch.fft.irfft(spectrum * spectrum.abs().clamp(max=1).detach(), n=x.shape[-1])
        x = x + torch.sparse.mm(self.shift.to_sparse(), x.t()).t() * x.mean()
        x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(y) * y, x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            return x * x.sin()


class Odds(Squares):
    def __init__(self, layers: int) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Odd(16) for _ in range(layers))


SPARING: list[dict[str, Any]] = [
    {"offload": "activations"},
    {"offload": "activations", "recompute": "blocks:2"},
    {"offload": "boundaries", "recompute": "blocks"},
    {"offload": "boundaries", "recompute": "full"},
]


def micro_batches(rows: int) -> list[dict[str, Tensor]]:
    """Returns those of a step."""
    return [{"x": torch.randn(rows, 16, generator=torch.Generator().manual_seed(i))} for i in range(6)]


def trained(model: type[Squares], config: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Returns the gradients of a step, and the most that was in the pool."""
    torch.manual_seed(0)
    made = model(LAYERS)
    batches = micro_batches(256)
    with closing(fold3d.Engine(made, fold3d.ParallelConfig(**config), example=batches[0])) as engine:
        engine.run(batches, returned_loss)
        most = engine.breakdown().pool_peak_bytes
    return [parameter.grad for parameter in made.parameters() if parameter.grad is not None], most


@functools.cache
def kept(model: type[Squares]) -> list[Tensor]:
    """Returns the gradients where nothing leaves."""
    return trained(model, COMMON)[0]


@pytest.mark.parametrize(
    ("model", "spared"),
    [
        pytest.param(model, spared, id=f"{model.__name__}-{spared}", marks=pytest.mark.full if number else ())
        for model in (Squares, Odds)
        for number, spared in enumerate(SPARING)
    ],
)
def test_a_pool_that_cannot_be_enough_is_refused_before_training(
    model: type[Squares], spared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proven before is never more than what the pool needs then: one of that size is taken. It is not much less
    either, but the later a copy is done, the more lies in the pool."""
    gradients, needed = trained(model, COMMON | spared)
    assert gradients and all(map(torch.equal, gradients, kept(model)))
    monkeypatch.setattr(fold3d.Engine, "run", None)  # nothing trains
    example = micro_batches(256)[0]
    config = fold3d.ParallelConfig(**COMMON, **spared, offload_pool=needed)
    fold3d.Engine(model(LAYERS), config, example=example).close()
    config = fold3d.ParallelConfig(**COMMON, **spared, offload_pool=needed // 4)
    with pytest.raises(fold3d.ConfigError, match=r"offload_pool=.*stage 0 .*at least .*B .*raise it"):
        fold3d.Engine(model(LAYERS), config, example=example)


def test_micro_batches_that_grow_fill_the_pool_later() -> None:
    """What an example does not tell is an error when it happens."""
    config = fold3d.ParallelConfig(**LEAVES, offload_pool="200kB")
    engine = fold3d.Engine(Squares(LAYERS), config, example={"x": torch.randn(64, 16)})
    full = r"the pool for offloaded activations is full.*raise offload_pool"
    with closing(engine), pytest.raises(fold3d.RankError, match=full):
        engine.run(micro_batches(4096), returned_loss)


def test_what_others_have_reserved_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a host look at what it has left before any of them takes its part: one that came later found too
    little for all."""
    left = [10_000_000, 5_000_000]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(offload, "room_for_pools", lambda config: left.pop(0))
    config = fold3d.ParallelConfig(**LEAVES, offload_pool="4MB")
    fold3d.Engine(Squares(LAYERS), config, example={"x": torch.randn(64, 16)}).close()
    assert left == [5_000_000]
    with pytest.raises(fold3d.ConfigError, match=r"offload_pool=4000000: the host has 5 MB .* for 2 processes"):
        fold3d.Engine(Squares(LAYERS), config, example={"x": torch.randn(64, 16)})


def test_a_planned_pool_is_reserved_before_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not step by step: memory, or a disk, that is too small is found then.

    How much is in the pool at once depends on how fast copies are, and so does what is planned, which knows only how
    fast they were when it was measured: both lie between what no copy is fast enough to avoid and all that leaves.
    """
    config = fold3d.ParallelConfig(**LEAVES, memory_limit="1GB", offload_disk=str(tmp_path))
    batches = micro_batches(256)
    with closing(fold3d.Engine(Squares(LAYERS), config, example=batches[0])) as engine:
        least, reserved = _least_pool(engine, batches[0]), _pool_bytes(engine)
        engine.run(batches, returned_loss)
        account = engine.breakdown()
        assert 2**14 * 4 * 6 < least <= reserved <= account.offload_bytes
        assert least <= account.pool_peak_bytes <= _pool_bytes(engine)
    monkeypatch.setattr(offload, "room_for_pools", lambda config: least // 2)
    with pytest.raises(fold3d.ConfigError, match=f'offload_pool="auto": the plan has .* free in {tmp_path}'):
        fold3d.Engine(Squares(LAYERS), config, example=batches[0])


def _least_pool(engine: fold3d.Engine, example: dict[str, Tensor]) -> int:
    """Returns the bytes that the pool needs however fast copies are."""
    strategy = engine.strategy
    assert engine.trace is not None
    known = stashes_of(Squares(LAYERS), engine.trace, example, strategy.ranges, 1, RECOMPUTE.of(strategy))
    (least,) = _C.least_pools(Programs.of(strategy).training(6), known.kept, known.sent)
    return least


def _pool_bytes(engine: fold3d.Engine) -> int:
    assert engine._rank is not None
    counters = engine._rank.step.pipeline._executor.offload_counters()
    assert counters is not None
    return counters.pool_bytes


@pytest.mark.parametrize("folder", ["nowhere", "file"])
@pytest.mark.parametrize("limit", [None, "1GB"])
def test_a_folder_that_is_none_is_refused_before_anything_is_measured(
    tmp_path: Any, folder: str, limit: str | None
) -> None:
    (tmp_path / "file").touch()
    config = fold3d.ParallelConfig(
        segments=2, blocks="layers", offload_disk=str(tmp_path / folder), offload="activations", memory_limit=limit
    )
    with pytest.raises(fold3d.ConfigError, match=r"offload_disk=.*must be a folder"):
        fold3d.Engine(Squares(LAYERS), config, example={"x": torch.randn(4, 16)})


def test_a_disk_whose_speed_cannot_be_measured_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(planner, "copy_bandwidth", full)
    config = fold3d.ParallelConfig(segments=2, blocks="layers", offload_disk=str(tmp_path), memory_limit="1GB")
    with pytest.raises(fold3d.ConfigError, match=r"offload_disk=.*No space left on device; free space there"):
        fold3d.Engine(Squares(LAYERS), config, example={"x": torch.randn(4, 16)})
