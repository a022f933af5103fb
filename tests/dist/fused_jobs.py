"""A model whose sums are large enough to be cut into several exchanges, trained with and without that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig

WIDTH, HEADS = 256, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = (self.query(x), self.key(x), self.value(x))
        heads = [one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in made]
        mixed: Tensor = self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return mixed


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.perceptron = Attention(), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.perceptron(self.second(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * torch.linspace(-1, 1, WIDTH, dtype=x.dtype)).square().mean()


def inputs(samples: int, length: int) -> dict[str, Tensor]:
    """Returns one micro-batch."""
    return {"x": torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}


def losses(tp: int, samples: int, length: int, overlap: str = "auto", **settings: bool) -> list[float]:
    """Returns the losses of three steps, and of an evaluation behind them."""
    torch.manual_seed(0)
    config = ParallelConfig(tp=tp, segments=1, tp_overlap=overlap, blocks="layers", **settings)  # type: ignore[arg-type]
    batch = inputs(samples, length)
    example = inputs(2, 6)  # what is found out with it holds for any number of rows
    engine = Engine(
        Net().double(), config, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=30.0), example=example
    )
    found = [engine.step(batch).loss.item() for _ in range(3)] + [engine.evaluate(batch).item()]
    engine.close()
    return found
