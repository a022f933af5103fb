"""(b) and (c): one model, trained by fold3d and by what torch has, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the model, and of what is measured."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    """Tokens of a row."""
    rows: int
    """Of a micro-batch."""
    micro_batches: int
    """Of a process and step."""
    steps: int
    """Timed at a time."""
    rounds: int
    """Turns of each system; their median counts."""

    @property
    def tokens(self) -> int:
        """Of a process's step."""
        return self.rows * self.length * self.micro_batches

    @property
    def flops_of_token(self) -> float:
        """Forward and backward, of matrix products: 6 for each parameter in one, and those of attention."""
        layer = 12 * self.width**2
        return 6 * (self.layers * layer + self.width * self.vocabulary) + 12 * self.layers * self.width * self.length


class Layer(nn.Module):
    """A decoder's layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            one.view(rows, length, self.heads, -1).transpose(1, 2) for one in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        down: Tensor = self.down(nn.functional.gelu(self.up(self.second(x))))
        return x + down


class Decoder(nn.Module):
    """The model of (b) and (c)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(self.norm(x)), labels)


class Part(nn.Module):
    """A stage of it, for torch's pipelining."""

    def __init__(self, model: Decoder, stage: int, stages: int) -> None:
        super().__init__()
        count = len(model.layers)
        begin, end = stage * count // stages, (stage + 1) * count // stages
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.layers = model.layers[begin:end]
        self.head = nn.Sequential(model.norm, model.head) if stage == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def race(systems: dict[str, Step], device: str, *, rounds: int, steps: int = 1) -> dict[str, float]:
    """Returns the median seconds of each system's step; they take turns, after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, step in systems.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            if turn > 0:
                found[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in found.items()}


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


Systems = tuple[dict[str, Step], Callable[[], None]]


def replicas(rank: int, world: int, device: str, sizes: Sizes) -> Systems:
    """DistributedDataParallel, and fold3d with as many replicas; bf16 by autocast, AdamW, no clipping."""
    batch = _batch(device, sizes)
    model = _model(device, sizes)
    wrapped = DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")

    def plain() -> None:
        parts = [dict(zip(batch, values, strict=True)) for values in zip(*_chunks(batch, sizes), strict=True)]
        for number, part in enumerate(parts):
            wrapped.require_backward_grad_sync = number == len(parts) - 1
            with _autocast(device):
                loss = wrapped(**part)
            (loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    systems: dict[str, Step] = {"torch DistributedDataParallel": plain}
    ways: dict[str, dict[str, Any]] = {
        "fold3d early": {"dp_sync": "early"},
        "fold3d zero1": {"dp_sync": "zero1"},
        "fold3d zero1, kernels": {"dp_sync": "zero1", "kernels": "fold3d"},
        "fold3d early, bfloat16": {"dp_sync": "early", "dp_sync_dtype": "bfloat16"},
        "fold3d serial": {"dp_sync": "serial"},
    }
    return _with_engines(systems, ways, {"dp": world, "segments": 1}, device, sizes, batch)


def stages(rank: int, world: int, device: str, sizes: Sizes) -> Systems:
    """torch's 1F1B, and fold3d with as many stages in 1F1B and in what it chooses."""
    batch = _batch(device, sizes)
    part = Part(_model(device, sizes), rank, world).to(device)
    stage = PipelineStage(part, rank, world, torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
    schedule = Schedule1F1B(stage, sizes.micro_batches, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4, fused=device == "cuda")

    def plain() -> None:
        with _autocast(device):
            if rank == 0:
                schedule.step(batch["input_ids"])
            elif rank == world - 1:
                schedule.step(target=batch["labels"], losses=[])
            else:
                schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    systems: dict[str, Step] = {"torch pipelining, 1F1B": plain}
    most = max(1, sizes.layers // world)
    ways: dict[str, dict[str, Any]] = {
        "fold3d 1f1b": {"schedule": "1f1b", "segments": 1},
        "fold3d aiao": {"schedule": "aiao", "segments": min(2, most)},
    }
    return _with_engines(systems, ways, {"pp": world}, device, sizes, batch)


def _with_engines(
    systems: dict[str, Step],
    ways: dict[str, dict[str, Any]],
    layout: dict[str, Any],
    device: str,
    sizes: Sizes,
    batch: dict[str, Tensor],
) -> Systems:
    import fold3d

    engines = []
    for name, settings in ways.items():
        config = fold3d.ParallelConfig(**layout, **settings, micro_batches=sizes.micro_batches)
        engine = fold3d.Engine(
            _model(device, sizes),
            config,
            optimizer=lambda given: torch.optim.AdamW(given, lr=1e-4, fused=device == "cuda"),
        )
        engines.append(engine)

        def step(engine: Any = engine) -> None:
            with _autocast(device):
                engine.step(batch)
            engine.flush()

        systems[name] = step

    def close() -> None:
        for engine in engines:
            engine.close()

    return systems, close


def _model(device: str, sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(sizes).to(device)


def _batch(device: str, sizes: Sizes) -> dict[str, Tensor]:
    ids = torch.randint(0, sizes.vocabulary, (sizes.rows * sizes.micro_batches, sizes.length), device=device)
    return {"input_ids": ids, "labels": ids}


def _chunks(batch: dict[str, Tensor], sizes: Sizes) -> list[tuple[Tensor, ...]]:
    return [value.chunk(sizes.micro_batches) for value in batch.values()]


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
