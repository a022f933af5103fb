"""What a rank of a tensor-parallel group needs, and what layers need whose modules recompute."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fold3d.profile.layer_bytes import layer_bytes
from fold3d.profile.layers import assumed_profile
from fold3d.profile.shard import layers_of_a_shard
from fold3d.recompute import Recompute
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
from fold3d.splitting.plan_sharding import plan_sharding
from fold3d.trace import trace
from tests.helpers.layer_sums import recomputed
from tests.helpers.models import MODELS

WIDTH, ROWS = 64, 32
ROW_BYTES = 4 * WIDTH * ROWS
HALVES = (((0, WIDTH // 2),), ((WIDTH // 2, WIDTH),))


class Pairs(nn.Module):
    """Blocks of two products, between which is what a rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        self.layers = nn.ModuleList(nn.Sequential(*part) for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_what_lies_between_a_split_pair_of_products_is_a_part() -> None:
    model, batch = Pairs(), {"x": torch.zeros(ROWS, WIDTH)}
    shards = {}
    for block in range(3):
        shards[f"layers.{block}.0.weight"] = Shard(0, WIDTH, HALVES)
        shards[f"layers.{block}.0.bias"] = Shard(0, WIDTH, HALVES)
        shards[f"layers.{block}.2.weight"] = Shard(1, WIDTH, HALVES)
    recorded = trace(model, example=batch)
    whole = layer_bytes(model, recorded, batch)
    part = layers_of_a_shard(model, recorded, batch, ShardingPlan(tp=2, shards=shards))
    assert [layer.saved for layer in whole[1:-1]] == [2 * ROW_BYTES] * 3
    assert [layer.saved for layer in part[1:-1]] == [3 * ROW_BYTES // 2] * 3
    assert [layer.outputs for layer in part] == [layer.outputs for layer in whole]
    assert all(mine.backward < all_of_it.backward for mine, all_of_it in zip(part[1:-1], whole[1:-1], strict=True))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_ranks_that_share_layers_keep_less(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[kind]())
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    recorded = trace(model, example=batch)
    whole = layer_bytes(model, recorded, batch)
    kept = []
    for shares_sequence in (False, True):
        sharding = plan_sharding(model, recorded, batch, 2, sequence_parallel=shares_sequence)
        assert bool(sharding.sequence) == shares_sequence
        part = layers_of_a_shard(model, recorded, batch, sharding)
        kept.append(part[1].saved)
        assert whole[1].saved / 2 <= part[1].saved < 0.8 * whole[1].saved
    assert kept[1] < kept[0]


def test_modules_that_recompute_keep_less_than_blocks_and_cost_less() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS["gpt2"]())
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    recorded = trace(model, example=batch)
    again = Recompute.parse("mlp/none")
    profile = assumed_profile(model, recorded, batch, flops_per_second=1e9, recompute=again)
    (inside,) = profile.inside
    blocks = recomputed(profile.layers[1], profile.activation_bytes[0])
    assert blocks.saved < inside.layers[1].saved < profile.layers[1].saved
    assert 0 < inside.seconds[1] < profile.forward[1] and inside.seconds[0] == 0
