"""Layers that models are made of besides the usual: adapters, experts as modules, low ranks, shared weights."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from fold3d.errors import ConfigError
from fold3d.splitting import plan_sharding
from fold3d.trace import trace
from fold3d.trace.batches import synthetic_example
from fold3d.trace.capture import trace_call
from tests.splitting.shared import compare


class Adapted(nn.Module):
    """A frozen linear layer and two thin ones beside it (Hu et al., "LoRA", 2021)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, 4, bias=False)
        self.b = nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.b(self.a(x))
        return out


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(16, 64), Adapted(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class ExpertsBlock(nn.Module):
    """Two experts as modules, chosen by a router; every token goes to the better one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        out = x
        for number, expert in enumerate(self.experts):
            out = out + weights[..., number, None] * expert(x)
        return out


class SharedNormBlock(nn.Module):
    """A norm behind the heads, which all of them share, and a bottleneck in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Linear(16, 8)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 16)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(torch.relu(self.squeeze(x))).unflatten(-1, (-1, 8))
        out: Tensor = x + self.down(self.norm(heads).flatten(-2))
        return out


class LimitedBlock(nn.Module):
    """Makes neurons smaller where they are large together, which they are not at first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def limited(self, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        return torch.where(norm > 40, 40 * x / norm, x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.limited(torch.relu(self.up(x))))
        return out


class RenormBlock(LimitedBlock):
    def limited(self, x: Tensor) -> Tensor:
        return torch.renorm(x.flatten(0, 1), 2, 0, 40.0).view_as(x)


class GatedBlock(LimitedBlock):
    """Only neurons that are not small beside the largest one count."""

    def limited(self, x: Tensor) -> Tensor:
        size = x.detach().square().mean((0, 1))
        return x * (size > 1e-3 * size.max())


class GatedHeads(nn.Module):
    """Only heads that are not small beside the largest one count."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.value(x).unflatten(-1, (self.heads, 4)).cumsum(1)
        size = heads.detach().square().mean((0, 1, 3))
        out: Tensor = x + self.out((heads * (size >= 0.02 * size.max())[:, None]).flatten(-2))
        return out


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = layer(x)
        return (x,)


def stacked(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Stack(kind).double(), {"x": torch.randn(2, 3, 16).double()}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "kind, entries, summed",
    [
        (AdaptedBlock, {"up.base", "up.b"}, set()),
        (ExpertsBlock, {"experts.0.0", "experts.1.0"}, set()),
        (SharedNormBlock, {"up"}, {"norm.weight", "norm.bias"}),
    ],
)
def test_layers(kind: type[nn.Module], entries: set[str], summed: set[str], tp: int) -> None:
    model, batch = stacked(kind)
    plan = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, tp)
    split = plan.blocks["layers.1"]
    assert {entry for group in split.groups for entry in group.entries} == entries
    assert {name for name, shard in split.shards.items() if shard.is_replicated and shard.summed} == summed
    assert compare(model, batch, plan) < 1e-10


@pytest.mark.parametrize("kind", [LimitedBlock, RenormBlock, GatedBlock, GatedHeads])
def test_a_limit_that_small_weights_do_not_reach(kind: type[nn.Module]) -> None:
    """Neither shows in NaN that reaches other neurons."""
    model, batch = stacked(kind)
    with pytest.raises(ConfigError, match=r"cannot be divided: divided, rank . returns something else"):
        plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)


def test_weights_that_blocks_share_are_whole() -> None:
    model, batch = stacked(SharedNormBlock)
    first, second = model.get_submodule("layers.0.up"), model.get_submodule("layers.1.up")
    second.weight = first.weight  # type: ignore[assignment]
    traced = trace_call(model, ["layers.0", "layers.1"], batch)
    with pytest.raises(ConfigError, match=r"layers\.0\.(up|down) .*cannot be divided"):
        plan_sharding(model, traced, batch, 2)


def test_a_wide_block_on_the_meta_device() -> None:
    config = hf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32,
        vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    traced = trace(model)
    plan = plan_sharding(model, traced, synthetic_example(model), 8)
    assert [group.units for group in plan.blocks["model.layers.31"].groups] == [8, 14336]
    assert len({id(split) for split in plan.blocks.values()}) == 1
    assert plan.shards["model.layers.31.self_attn.k_proj.weight"].length(0) == 128
    assert all(parameter.is_meta for parameter in model.parameters())
