"""Ranks that share blocks and their sequence together compute the whole, where a model allows it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting import plan_sharding
from fold3d.trace.capture import trace_call
from tests.splitting.models import build
from tests.splitting.shared import compare, saved_bytes

POSSIBLE = (
    "gpt2", "llama", "opt", "bert", "gpt_neox", "bloom", "t5_encoder", "vit", "qwen3", "phi3", "falcon_groups",
    "falcon_mqa", "falcon_alibi", "gptj", "mpt", "llama_mqa", "deepseek", "mixtral", "qwen3_moe", "gpt_oss", "t5",
)  # fmt: skip
NORMS = {"llama": 2, "gpt2": 6, "bert": 6, "mixtral": 3, "gpt_oss": 6}
"""Parameters of a block that work on parts: norms, biases behind sums, and routers to experts."""


def plan_of(family: str, tp: int) -> ShardingPlan:
    tiny = build(family)
    return plan_sharding(tiny.model, tiny.trace(), tiny.batch, tp, sequence_parallel=True)


@pytest.mark.gate(cases=3)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", POSSIBLE)
def test_ranks_together_compute_the_whole(family: str, tp: int) -> None:
    """Of 6 tokens four ranks have 2, 2, 1 and 1; ViT's 5 are no equal parts for any."""
    tiny = build(family)
    plan = plan_of(family, tp)
    assert plan.sequence_reason == ""
    assert plan.sequence.keys() == plan.blocks.keys()
    first, *_, last = plan.sequence.values()
    assert (first.begins, first.ends, last.begins, last.ends) == (True, False, False, True)
    assert compare(tiny.model, tiny.batch, plan) < 1e-10
    if family in NORMS:
        name = next(iter(plan.blocks))
        assert sum(s.summed for n, s in plan.shards.items() if n.startswith(f"{name}.")) == NORMS[family]


def test_what_reads_the_insides_of_blocks_is_said() -> None:
    """The balance loss of experts is of what the routers in the blocks find."""
    tiny = build("mixtral")
    tiny.model.config.output_router_logits = True  # type: ignore[union-attr]
    call = tiny.model, tiny.trace(), tiny.batch, 2
    plan = plan_sharding(*call, sequence_parallel=True)
    assert "what 'model.layers.0.mlp.gate' returned is read" in plan.sequence_reason and not plan.sequence
    assert dataclasses.replace(plan, sequence_reason="") == plan_sharding(*call)


@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral"])
def test_sequences_shorter_than_there_are_ranks(family: str) -> None:
    """Some have nothing of them."""
    tiny = build(family)
    short = {name: value[:, :3] for name, value in tiny.batch.items()}
    assert compare(tiny.model, short, plan_of(family, 4)) < 1e-10


@pytest.mark.parametrize(("family", "most"), [("llama", 0.75), ("gpt2", 0.87)])
def test_less_is_kept_for_the_backward(family: str, most: float) -> None:
    """With dropout, whose masks are drawn for all and kept in part."""
    tiny = build(family)
    for module in tiny.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    ids = torch.randint(1, 96, (2, 32))
    batch = {"input_ids": ids}
    whole = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 4)
    shared, without = (saved_bytes(tiny.model, batch, plan) for plan in (plan_of(family, 4), whole))
    assert shared < most * without, (shared, without)


class Block(nn.Module):
    """A block that a residual goes around, or that looks at its neighbours' rows outside of what is shared."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.mixes:
            y = y + y.roll(1, dims=1)
        out: Tensor = x + self.down(torch.relu(self.up(y)))
        return out


class Stack(nn.Module):
    def __init__(self, mixes: bool, changes: bool = False, time_first: bool = False, times: int = 1) -> None:
        super().__init__()
        self.changes, self.time_first, self.times = changes, time_first, times
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Block(mixes) for _ in range(3))
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        x = self.embedding(input_ids)
        x = x.transpose(0, 1) if self.time_first else x
        for layer in [*[self.layers[0]] * self.times, *self.layers[1:]]:
            x = layer(x)
            if self.changes:
                x = x * 1.5
        return (self.head(x),)


def stack(**how: Any) -> tuple[nn.Module, dict[str, Tensor], ShardingPlan]:
    torch.manual_seed(0)
    model, batch = Stack(**how).double(), {"input_ids": torch.randint(0, 20, (2, 7))}
    traced = trace_call(model, [f"layers.{number}" for number in range(3)], batch)
    return model, batch, plan_sharding(model, traced, batch, 2, sequence_parallel=True)


def test_a_region_without_a_module_of_its_own() -> None:
    model, batch, plan = stack(mixes=False)
    assert [gather.module for gather in plan.sequence["layers.0"].gathers] == ["up"]
    assert compare(model, batch, plan) < 1e-10


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mixes": True}, "layers.0"),
        ({"mixes": False, "changes": True}, "takes"),
        ({"mixes": False, "times": 3}, "layers.0 runs several times"),
    ],
)
def test_what_would_be_wrong_is_not_done(how: dict[str, Any], said: str) -> None:
    model, batch, plan = stack(**how)
    assert not plan.sequence and said in plan.sequence_reason
    assert compare(model, batch, plan) < 1e-10
