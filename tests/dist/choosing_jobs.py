"""Models whose batches choose which modules run: what one process and fold3d's ranks compute with them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fold3d
from fold3d.errors import Fold3dError
from tests.dist.parity_jobs import COMM_TIMEOUT_S, Batch, Result

WIDTH, LAYERS, ROWS, STEPS, M = 8, 4, 2, 4, 2
KINDS = ("heads", "adapters", "tower", "late_tower")
STACK = "tower_of_blocks"
"""The blocks that run depend on the batch: such a model can be trained, and not be cut."""
MAX_NORM = 0.5
"""Most gradients are larger."""


class Block(nn.Module):
    """A layer with an adapter for each language, of which a batch runs one."""

    def __init__(self, languages: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(languages))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        x = x + torch.tanh(self.up(x))
        return x + self.adapters[choice](x) if self.adapters else x


class Choosing(nn.Module):
    """Blocks, behind and in front of which the batch chooses; what `kind` is not about runs always the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(11)
        if kind == STACK:
            self.tower = nn.Module()
            self.tower.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        if kind == "tower":
            self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.embedding = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block(3 if kind == "adapters" else 0) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3 if kind == "heads" else 1))
        # Of a shape of its own in front of one that is like the others: what shifts buckets shows.
        self.language = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=n > 0) for n in range(3 if kind == "adapters" else 0)
        )
        if kind == "late_tower":
            self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, y: Tensor, choice: Tensor, images: Tensor | None = None) -> Tensor:
        task = int(choice[0])
        x = self.embedding(ids)
        if images is not None:
            for layer in getattr(self.tower, "layers", [self.tower]):
                images = layer(images)
            x = x + images
        for block in self.blocks:
            x = block(x, task)
        x = self.norm(x)
        if self.language:
            x = x + self.language[task](x)
        x = self.heads[task if len(self.heads) > 1 else 0](x)
        return (x - y).square().mean()


def micro_batch(kind: str, rng: random.Random) -> Batch:
    """Returns a micro-batch that makes a choice of its own."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    choice = rng.randrange(3)
    made = {
        "ids": torch.randint(13, (ROWS, 3), generator=generator),
        "y": torch.randn(ROWS, 3, WIDTH, generator=generator),
        "choice": torch.full((ROWS,), choice),
    }
    if "tower" in kind and choice:
        made["images"] = torch.randn(ROWS, 3, WIDTH, generator=generator)
    return made


def batches(kind: str, seed: int, dp: int) -> list[list[list[Batch]]]:
    """Returns of each step the micro-batches of each replica."""
    rng = random.Random(f"{kind} {seed}")
    return [[[micro_batch(kind, rng) for _ in range(M)] for _ in range(dp)] for _ in range(STEPS)]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays weights: what has no gradient must not move."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3, eps=1e-4)


@contextmanager
def in_double() -> Iterator[None]:
    """Weights, losses and norms are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
@in_double()
def train_alone(kind: str, seed: int, dp: int) -> Result:
    """Trains in this process, in a loop of torch's."""
    model = Choosing(kind)
    optimizer = adamw(list(model.parameters()))
    result = Result()
    for step in batches(kind, seed, dp):
        losses = [model(**one) / (dp * M) for replica in step for one in replica]
        sum(losses).backward()  # type: ignore[union-attr]
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(sum(loss.item() for loss in losses))
    result.weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return result


def train(kind: str, seeds: list[int], dp: int, evaluates: bool, **layout: Any) -> list[Result | str]:
    """Trains on this rank, once for each seed; returns what came of it, the reason where fold3d refused.

    Args:
        evaluates: a batch of another kind of choice is evaluated before the first step.
    """
    return [_train(kind, seed, dp, evaluates, **layout) for seed in seeds]


@in_double()
def _train(kind: str, seed: int, dp: int, evaluates: bool, **layout: Any) -> Result | str:
    named = {"comm_timeout": COMM_TIMEOUT_S, "blocks": "tower.layers,blocks" if kind == STACK else "blocks"} | layout
    config = fold3d.ParallelConfig(dp=dp, micro_batches=M, **named)
    engine = fold3d.Engine(Choosing(kind), config, optimizer=adamw, max_grad_norm=MAX_NORM)
    result, replica = Result(), engine.topology.dp_rank
    try:
        if evaluates:
            engine.forward(micro_batch(kind, random.Random(f"{seed} {replica}")), lambda model, batch: model(**batch))
        for step in batches(kind, seed, dp):
            loss = engine.run(step[replica], lambda model, batch: model(**batch) / M)
            result.losses.append(float(engine._built().step.mean_loss(loss)))
            result.norms.append(float(engine.clip_grad_norm(MAX_NORM)))
            assert engine.optimizer is not None
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        result.weights = engine.state_dict()["model"]
    except Fold3dError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return result
