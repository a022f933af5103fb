"""Blocks whose code asks for views by sizes of the whole, such as width // heads, which a rank does not have."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import ConfigError
from fold3d.splitting import plan_sharding
from fold3d.tensor_parallel.whole_sizes import WholeSizes
from fold3d.trace.capture import trace_call
from tests.helpers.ranks import RankPool
from tests.splitting.shared import compare

WIDTH, HEADS = 16, 4


class Fused(nn.Module):
    """Heads from sizes of the hidden state, of one product that is split by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd, self.n_head = WIDTH, HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(8, 8).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        heads = (
            one.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
            for one in self.c_attn(x).split(self.n_embd, dim=2)
        )
        q, k, v = heads
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(~self.seen[:tokens, :tokens], -math.inf)  # type: ignore[index]
        y = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(batch, tokens, width)
        out: Tensor = self.c_proj(y)
        return out


class Stacked(nn.Module):
    """Queries, keys and values along a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Apart(nn.Module):
    """Products of their own, and numbers in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (4, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(x.shape))
        return out


class Grouped(nn.Module):
    """Two heads share their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups, self.width = HEADS, 2, WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.width).transpose(1, 2)
        k, v = (self.repeated(one(x).view(batch, tokens, self.groups, -1)) for one in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(batch, tokens, width))
        return out

    def repeated(self, x: Tensor) -> Tensor:
        batch, tokens, _, width = x.shape
        each = self.heads // self.groups
        x = x.transpose(1, 2)[:, :, None].expand(batch, self.groups, each, tokens, width)
        return x.reshape(batch, self.heads, tokens, width)


class Folded(Apart):
    """Heads lie in the dimension of samples."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            one(x).view(batch, tokens, 4, 4).transpose(1, 2).reshape(batch * 4, tokens, 4)
            for one in (self.q, self.k, self.v)
        )
        y = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(batch, 4, tokens, 4)
        out: Tensor = self.o(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Layers(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(attention) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = layer(x)
        return (x,)


def made(attention: type[nn.Module], tp: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, batch = Layers(attention).double(), {"x": torch.randn(2, 6, WIDTH).double()}
    return model, plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, tp)


@pytest.mark.gate(cases=5)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("attention", [Fused, Stacked, Apart, Grouped])
def test_views_are_those_of_a_rank(attention: type[nn.Module], tp: int) -> None:
    """In batches of other sizes, too: of one sample, an odd number, and one token."""
    model, plan = made(attention, tp)
    assert all("attention." in name or "up." in name or "down." in name for name in plan.shards)
    assert len({name for name in plan.shards if ".attention." in name and name.endswith("weight")}) >= 4
    for sizes in ((2, 6), (1, 6), (3, 5), (4, 8), (2, 1), (1, 1)):
        assert compare(model, {"x": torch.randn(*sizes, WIDTH).double()}, plan) < 1e-10, sizes


class Mean(Layers):
    """Returns a loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0].square().mean()


def trained(layout: dict[str, Any]) -> list[float]:
    """Returns the losses of steps with batches of several sizes."""
    torch.manual_seed(0)
    model = Mean(Fused).double()
    config = ParallelConfig(micro_batches=2, blocks="layers", **layout)
    engine = Engine(model, config, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    losses = []
    for samples, tokens in ((4, 6), (4, 6), (2, 6), (6, 3)):
        losses.append(engine.step({"x": torch.randn(samples, tokens, WIDTH).double()}).loss.item())
    engine.close()
    return losses


@pytest.mark.gate
@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True, "tp_overlap": "sub"}], ids=str)
def test_training(ranks: RankPool, more: dict[str, Any]) -> None:
    for found in ranks.run(trained, 2, {"tp": 2, **more}):
        assert found == pytest.approx(trained({}), rel=1e-10)


def test_what_is_not_clear_is_refused() -> None:
    """Whether samples or heads are divided in (samples * heads) -> (samples, heads), no sizes tell."""
    with pytest.raises(
        ConfigError, match=r"attention\.q \(16, 16\) cannot be divided: a rank's part computes something"
    ):
        made(Folded, 2)


@pytest.mark.parametrize(
    ("shape", "sizes", "of_rank"),
    [
        ((2, 8, 16), (2, 8, 4, 8), (2, 8, 2, 8)),
        ((2, 8, 48), (2, 8, 3, 4, 8), (2, 8, 3, 2, 8)),
        ((2, 8, 2, 8), (2, 8, 32), (2, 8, 16)),
        ((4, 8, 2, 8), (32, 32), (32, 16)),
        ((2, 2, 8, 8), (8, 8, 8), (4, 8, 8)),
        ((2, 1, 16), (2, 1, 4, 8), (2, 1, 2, 8)),
        ((16,), (4, 8), (2, 8)),
        ((2, 8, 16), (2, 8, 16), (2, 8, 16)),
        ((2, 8, 4, 8), (2, 8, 32), (2, 8, 32)),
        ((2, 2, 2, 8), (4, 32), (4, 32)),  # or is it (2, 32)?
        ((4, 8, 8), (2, 4, 8, 8), (2, 4, 8, 8)),  # samples or heads?
        ((8, 4, 8), (8, 2, 32), (8, 2, 32)),
        ((4, 8, 8), (4, 8, 2, 8), (4, 8, 1, 8)),  # one head on a rank
        ((4, 8, 2), (4, 8, 2, 2), (4, 8, 1, 2)),
        ((2, 8, 1, 8), (2, 8, 16), (2, 8, 8)),
    ],
)
def test_sizes(shape: tuple[int, ...], sizes: tuple[int, ...], of_rank: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with WholeSizes(2):
        for view in (Tensor.view, Tensor.reshape, torch.reshape):
            if math.prod(of_rank) == x.numel():
                assert view(x, sizes).shape == of_rank
            else:
                with pytest.raises(RuntimeError, match="is invalid for input of size"):
                    view(x, sizes)
        if math.prod(of_rank) == x.numel():
            assert x.view(*sizes).shape == x.reshape(*sizes).shape == of_rank


def test_sizes_of_other_functions() -> None:
    x = torch.randn(2, 8, 16)
    with WholeSizes(2):
        assert x.unflatten(-1, (4, 8)).shape == torch.unflatten(x, 2, (4, 8)).shape == (2, 8, 2, 8)
        assert x[:, :, None].expand(2, 8, 5, 32).shape == x[:, :, None].expand((2, 8, 5, 32)).shape == (2, 8, 5, 16)
        assert x.view(2, 8, -1, 4).shape == (2, 8, 4, 4) and x.view(torch.int32).dtype == torch.int32
        with pytest.raises(RuntimeError):
            x.expand(2, 8, 17)
