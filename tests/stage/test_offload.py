"""A pool is proven, checked and reserved before anything is trained."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fold3d
from fold3d.engine.planning import planner
from fold3d.stage import offload


class Squares(nn.Module):
    """Layers whose graphs keep a tensor of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def squares(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Returns the loss of a micro-batch."""
    value: Tensor = model(**batch)
    return value


class Odd(nn.Module):
    """A block that saves what is no plain tensor of its own: views, a mask, a complex and a sparse tensor, what a
    checkpoint and hooks of its own keep."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.shift = nn.Buffer(torch.eye(width).roll(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, -1)
        x = x + left.t().sigmoid().t() * right.masked_fill(right > 1, 0.5)
        spectrum = torch.fft.rfft(x)
        x = torch.fft.irfft(spectrum * spectrum.abs().clamp(max=1).detach(), n=x.shape[-1])
        x = x + torch.sparse.mm(self.shift.to_sparse(), x.t()).t() * x.mean()
        x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(y) * y, x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            return x * x.sin()


class Odds(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd(16) for _ in range(8))


SPARING: list[dict[str, Any]] = [
    {"offload": "activations"},
    {"offload": "activations", "recompute": "blocks:2"},
    {"offload": "boundaries", "recompute": "blocks"},
    {"offload": "boundaries", "recompute": "full"},
]


@pytest.mark.parametrize("model", [Squares, Odds])
@pytest.mark.parametrize("spared", SPARING, ids=str)
def test_a_pool_that_cannot_be_enough_is_refused_before_training(
    model: type[Squares], spared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proven before is hardly less than what the pool needs then, and never more: one of that size is taken."""
    common: dict[str, Any] = {"segments": 2, "micro_batches": 6, "schedule": "aiao", "blocks": "layers", **spared}
    batches = [{"x": torch.randn(256, 16)} for _ in range(6)]
    found = {}
    for what in ("none", common["offload"]):
        torch.manual_seed(0)
        trained = model()
        config = fold3d.ParallelConfig(**(common | {"offload": what}))
        with closing(fold3d.Engine(trained, config, example=batches[0])) as engine:
            engine.run(batches, squares)
            needed = engine.breakdown().pool_peak_bytes
        found[what] = [parameter.grad for parameter in trained.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, found["none"], found[common["offload"]]))
    monkeypatch.setattr(fold3d.Engine, "run", None)  # nothing trains
    config = fold3d.ParallelConfig(**common, offload_pool=needed)
    fold3d.Engine(model(), config, example=batches[0]).close()
    config = fold3d.ParallelConfig(**common, offload_pool=int(0.75 * needed))
    with pytest.raises(fold3d.ConfigError, match=r"offload_pool=.*at least .*B .*raise it") as refused:
        fold3d.Engine(model(), config, example=batches[0])
    assert "stage 0" in str(refused.value)


def test_micro_batches_that_grow_fill_the_pool_later() -> None:
    """What an example does not tell is an error when it happens."""
    config = fold3d.ParallelConfig(
        segments=2, micro_batches=6, schedule="aiao", blocks="layers", offload="activations", offload_pool="200kB"
    )
    engine = fold3d.Engine(Squares(), config, example={"x": torch.randn(64, 16)})
    full = r"the pool for offloaded activations is full.*raise offload_pool"
    with closing(engine), pytest.raises(fold3d.RankError, match=full):
        engine.run([{"x": torch.randn(4096, 16)} for _ in range(6)], squares)


def test_what_others_have_reserved_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a host look at what it has left before any of them takes its part: one that came later found too
    little for all."""
    left = [10_000_000, 5_000_000]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(offload, "room_for_pools", lambda config: left.pop(0))
    config = fold3d.ParallelConfig(
        segments=2, micro_batches=6, schedule="aiao", blocks="layers", offload="activations", offload_pool="4MB"
    )
    fold3d.Engine(Squares(), config, example={"x": torch.randn(64, 16)}).close()
    assert left == [5_000_000]
    with pytest.raises(fold3d.ConfigError, match=r"offload_pool=4000000: the host has 5 MB .* for 2 processes"):
        fold3d.Engine(Squares(), config, example={"x": torch.randn(64, 16)})


def test_a_planned_pool_is_reserved_before_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not step by step: memory, or a disk, that is too small is found then."""
    config = fold3d.ParallelConfig(
        segments=2, micro_batches=6, schedule="aiao", blocks="layers", offload="activations", memory_limit="1GB",
        offload_disk=str(tmp_path),
    )  # fmt: skip
    batches = [{"x": torch.randn(256, 16)} for _ in range(6)]
    with closing(fold3d.Engine(Squares(), config, example=batches[0])) as engine:
        reserved = _pool_bytes(engine)
        engine.run(batches, squares)
        peak = engine.breakdown().pool_peak_bytes
        assert 0.8 * peak <= reserved <= _pool_bytes(engine) <= 1.5 * peak
    monkeypatch.setattr(offload, "room_for_pools", lambda config: peak // 2)
    with pytest.raises(fold3d.ConfigError, match=f'offload_pool="auto": the plan has .* free in {tmp_path}'):
        fold3d.Engine(Squares(), config, example=batches[0])


def _pool_bytes(engine: fold3d.Engine) -> int:
    assert engine._rank is not None
    counters = engine._rank.step._pipeline._executor.offload_counters()
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
        fold3d.Engine(Squares(), config, example={"x": torch.randn(4, 16)})


def test_a_disk_whose_speed_cannot_be_measured_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(planner, "copy_bandwidth", full)
    config = fold3d.ParallelConfig(segments=2, blocks="layers", offload_disk=str(tmp_path), memory_limit="1GB")
    with pytest.raises(fold3d.ConfigError, match=r"offload_disk=.*No space left on device; free space there"):
        fold3d.Engine(Squares(), config, example={"x": torch.randn(4, 16)})
