"""Recomputation changes no number: bitwise equal to a run that keeps everything, and it keeps less."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fold3d
from fold3d.errors import RankError
from tests.helpers import models
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

BLOCKS, WIDTH, ROWS = 4, 8, 6
STEPS = 2
Layout = dict[str, Any]
State = dict[str, Tensor]


class Noisy(nn.Module):
    """A block that draws from everything that can be drawn from, and reads and changes buffers."""

    count: Tensor

    def __init__(self, *, draws: bool, own_checkpoint: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.draws, self.own_checkpoint = draws, own_checkpoint
        self.register_buffer("count", torch.zeros(()))

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(torch.relu(self.up(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1  # what is computed depends on it
        scale = 1 + (random.random() + float(np.random.rand()) if self.draws else 0) / 10
        y = self.norm(x) * scale / self.count.clamp(min=1)
        return x + (checkpoint(self.mlp, y, use_reentrant=False) if self.own_checkpoint else self.mlp(y))


class Chain(nn.Module):
    """A chain of such blocks; the front changes a buffer, too."""

    mean: Tensor

    def __init__(self, *, draws: bool = False, own_checkpoint: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Noisy(draws=draws, own_checkpoint=own_checkpoint) for _ in range(BLOCKS))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = x - self.mean
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def batches(number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(ROWS, WIDTH, generator=generator), "y": torch.randn(ROWS, WIDTH, generator=generator)}
        for _ in range(number)
    ]


def in_bf16(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = model(**batch)
    return loss


def in_fp32(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def trained(layout: Layout, *, bf16: bool = False, around: bool = False, **model: bool) -> tuple[list[float], State]:
    """Returns the losses of some steps, then Python's and numpy's next numbers; and this rank's state.

    Args:
        around: autocast is entered around the steps instead of in the loss function.
    """
    random.seed(1)
    np.random.seed(1)
    m = layout.get("micro_batches", 1)
    config = fold3d.ParallelConfig(blocks="layers", comm_timeout=60.0, **layout)
    engine = fold3d.Engine(Chain(**model), config, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16) if around else nullcontext():
        for _ in range(STEPS):
            losses.append(engine.run(batches(m), in_bf16 if bf16 else in_fp32).item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    state = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    return [*losses, random.random(), float(np.random.rand())], state


def assert_same(found: tuple[list[float], State], expected: tuple[list[float], State], how: str = "") -> None:
    assert found[0] == expected[0], how
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), f"{how} {name}"


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"pp": 2, "segments": 2, "schedule": "aiao", "micro_batches": 4}, {}),
        ({"pp": 2, "segments": 2, "schedule": "aiao", "micro_batches": 3}, {"bf16": True}),
        ({"pp": 2, "schedule": "zb_h1", "micro_batches": 5}, {"around": True}),
        ({"pp": 2, "schedule": "gpipe", "micro_batches": 3}, {"draws": True, "own_checkpoint": True}),
        ({"segments": 4, "schedule": "interleaved", "micro_batches": 2}, {"draws": True}),
    ],
    ids=["aiao", "aiao-bf16", "zb_h1-autocast", "gpipe-draws", "one process"],
)
def test_equal_to_the_bit(ranks: RankPool, layout: Layout, named: dict[str, bool]) -> None:
    """Masks, batch norms' statistics, counters that the outputs depend on, numbers of Python and numpy, autocast."""
    world = layout.get("pp", 1)
    expected = ranks.run(trained, world, layout | {"recompute": False}, **named)
    chunks = world * layout.get("segments", 1)
    some = "/".join(["full", "none", "norm,up", "blocks:2"][:chunks])
    for recompute in ("full", some, *(("blocks:2", "down,norm") if world == 1 else ())):
        for found, wanted in zip(
            ranks.run(trained, world, layout | {"recompute": recompute}, **named), expected, strict=True
        ):
            assert_same(found, wanted, recompute)


def trained_gpt2(layout: Layout) -> tuple[list[float], State]:
    """Returns the losses of two steps and this rank's parts of the weights."""
    engine = fold3d.Engine(
        models.build(models.gpt2_config(dropout=0.1)),
        fold3d.ParallelConfig(micro_batches=3, comm_timeout=60.0, **layout),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        example={"input_ids": torch.zeros(2, 9, dtype=torch.int64), "labels": torch.zeros(2, 9, dtype=torch.int64)},
    )
    ids = torch.randint(0, models.VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(2))
    losses = [engine.step({"input_ids": ids, "labels": ids}).loss.item() for _ in range(STEPS)]
    state = {name: parameter.detach().clone() for name, parameter in engine.owned.items()}
    engine.close()
    return losses, state


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "segments": 2, "schedule": "aiao", "tp_overlap": "sub"},
        {"tp": 2, "pp": 2, "schedule": "zb_h1", "tp_overlap": "none", "sequence_parallel": True},
    ],
    ids=["halves", "sequence"],
)
def test_equal_to_the_bit_with_shards(ranks: RankPool, layout: Layout) -> None:
    expected = ranks.run(trained_gpt2, 4, layout | {"recompute": False})
    for found, wanted in zip(ranks.run(trained_gpt2, 4, layout | {"recompute": True}), expected, strict=True):
        assert_same(found, wanted)


def most_alive(layout: Layout) -> int:
    """Returns the most bytes of results of linear layers that were alive on this rank, in one step."""
    alive: dict[int, tuple[int, StorageWeakRef]] = {}
    peak = 0

    def note(module: nn.Module, args: Any, result: Tensor) -> None:
        nonlocal alive, peak
        alive = {key: one for key, one in alive.items() if not one[1].expired()}
        reference = StorageWeakRef(result.untyped_storage())
        alive[reference.cdata] = (result.untyped_storage().nbytes(), reference)
        peak = max(peak, sum(size for size, _ in alive.values()))

    model = Chain()
    for module in model.modules():
        if isinstance(module, nn.ReLU | nn.Linear | nn.Dropout):
            module.register_forward_hook(note)
    engine = fold3d.Engine(model, fold3d.ParallelConfig(blocks="layers", **layout), example=batches(1)[0])
    engine.run(batches(layout["micro_batches"]), in_fp32)
    engine.close()
    return peak


@pytest.mark.gate
def test_keeps_less(ranks: RankPool) -> None:
    """Only the inputs of chunks are kept per micro-batch, whatever is computed in them."""

    def peaks(recompute: str, m: int) -> list[int]:
        layout = {"pp": 2, "segments": 2, "schedule": "aiao", "micro_batches": m, "recompute": recompute}
        return ranks.run(most_alive, 2, layout)

    border = ROWS * WIDTH * 4
    for kept, full, more in zip(peaks("none", 8), peaks("full", 8), peaks("full", 16), strict=True):
        assert full < kept / 4
        assert more - full <= 2 * 8 * border  # two chunks of the rank, what they sent may still be on its way


def refused(recompute: str) -> str:
    config = fold3d.ParallelConfig(pp=2, blocks="layers", recompute=recompute, micro_batches=2)
    try:
        fold3d.Engine(Chain(), config, example=batches(1)[0]).close()
    except (fold3d.ConfigError, RankError) as error:
        return str(error)
    return ""


def test_names_that_there_are_not(ranks: RankPool) -> None:
    for text in ranks.run(refused, 2, "up,attention"):
        assert "'attention' names no module inside of a block" in text and "up, down, norm, drop" in text
    for text in ranks.run(refused, 2, "full/none/full"):
        assert "said of 3 chunks, and the model is cut into 2" in text
