"""Parameters that lie in memory in unusual ways, or are single numbers; states that are loaded over others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import fold3d
from tests.dist.dp_sync_loops import make_engine, weights

MICRO_BATCHES, STEPS = 2, 3
Batch = dict[str, Tensor]
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda p: AdamW(p, lr=0.01, fused=True),
    "fused SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda p: Adagrad(p, lr=0.05),
}


class Odd(nn.Module):
    """A convolution in channels_last, a linear layer with a transposed weight, a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.mix = nn.Linear(13, 11)
        self.mix.weight.data = self.mix.weight.data.t().contiguous().t()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean squared error."""
        error: Tensor = torch.tanh(self.mix(self.conv(x))) * self.scale.exp() - y
        return error.square().mean()


def build(dtype: torch.dtype) -> Odd:
    """Returns the model, the same everywhere."""
    model = Odd().to(dtype)
    assert not model.conv.weight.is_contiguous()
    assert not model.mix.weight.is_contiguous()
    return model


def batches(step: int, replica: int, dtype: torch.dtype) -> list[Batch]:
    """Returns the micro-batches of one replica."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    shapes = {"x": (2, 3, 4, 13), "y": (2, 5, 4, 11)}
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for _ in range(MICRO_BATCHES)
    ]


def share(model: nn.Module, batch: Batch) -> Tensor:
    """Returns a micro-batch's share of the loss."""
    loss: Tensor = model(**batch) / MICRO_BATCHES
    return loss


def alone(optimizer: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the weights that plain torch makes of two replicas' batches in one process."""
    model = build(dtype)
    made: Optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        made.zero_grad()
        for replica in range(2):
            for batch in batches(step, replica, dtype):
                (share(model, batch) / 2).backward()
        made.step()
    return weights(model)


class Job:
    """Two replicas that train `build(dtype)`."""

    def __init__(self, dp_sync: str, optimizer: str, dtype: torch.dtype, bucket_bytes: int = 0) -> None:
        self.dtype = dtype
        self.model = build(dtype)
        settings = {"micro_batches": MICRO_BATCHES, "bucket_bytes": bucket_bytes}
        self.engine = make_engine(self.model, dp_sync, settings, example=batches(0, 0, dtype)[0])
        self.optimizer: Optimizer = OPTIMIZERS[optimizer](list(self.engine.owned.values()))
        self.engine.attach(self.optimizer)

    def train(self, first: int, end: int) -> None:
        """Takes steps `first` to `end` - 1."""
        for step in range(first, end):
            self.engine.run(batches(step, self.engine.topology.dp_rank, self.dtype), share)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Returns a copy of the parameters once they are up to date."""
        self.engine.flush()
        return weights(self.model)


def train(dp_sync: str, optimizer: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the weights after STEPS steps."""
    job = Job(dp_sync, optimizer, dtype)
    job.train(0, STEPS)
    found = job.weights()
    job.engine.close()
    return found


def go_back(dp_sync: str, optimizer: str, bucket_bytes: int) -> tuple[dict[str, Tensor], ...]:
    """Returns the weights after two steps, and after going back to before the second, or the first, and on again."""
    job = Job(dp_sync, optimizer, torch.float64, bucket_bytes)
    saved = [job.engine.state_dict()]
    for step in range(2):
        job.train(step, step + 1)
        saved.append(job.engine.state_dict())
    found = [job.weights()]
    for step in (1, 0):
        job.engine.load_state_dict(saved[step])
        job.train(step, 2)
        found.append(job.weights())
    job.engine.close()
    return tuple(found)


class TwoTypes(nn.Module):
    """Two layers in fp32, then two in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[2:].double()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean square of what comes out."""
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.square().mean()


def norms(dp: int, dp_sync: str) -> list[Tensor]:
    """Returns the gradient norms that a rank is told, one stage in fp32 and one in fp64."""
    config = fold3d.ParallelConfig(dp=dp, pp=2, segments=1, micro_batches=2, blocks="layers", dp_sync=dp_sync)
    batch = {"x": torch.randn(4, 5, generator=torch.Generator().manual_seed(1))}
    engine = fold3d.Engine(TwoTypes(), config, optimizer=OPTIMIZERS["SGD"], example=batch)
    found = [engine.step(batch).grad_norm for _ in range(3)]
    engine.close()
    return [norm.clone() for norm in found if norm is not None]
