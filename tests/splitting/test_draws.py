"""The random numbers of a block are divided as its units are, so that dropout does not depend on tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import Slices
from fold3d.splitting import plan_sharding
from fold3d.tensor_parallel.random_draws import RowsRandom, ShardRandom
from fold3d.trace import trace
from fold3d.trace.capture import trace_call
from tests.splitting.models import VOCABULARY

TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32}


def model_of(family: str, attention: str) -> nn.Module:
    kind: Any
    if family == "gpt2":
        kind = hf.GPT2LMHeadModel
        config: Any = hf.GPT2Config(
            **TEXT, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.1, attn_pdrop=0.2
        )
    elif family == "llama":
        kind = hf.LlamaForCausalLM
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        config = hf.LlamaConfig(**TEXT, **WIDE, **heads, intermediate_size=48, attention_dropout=0.2)
    elif family == "bloom":  # samples and heads in one dimension
        kind = hf.BloomForCausalLM
        config = hf.BloomConfig(**TEXT, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.1, attention_dropout=0.2)
    else:
        kind = hf.OPTForCausalLM
        wide = {"word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 4}
        config = hf.OPTConfig(**TEXT, **WIDE, **wide, dropout=0.1, attention_dropout=0.2)
    model: nn.Module = kind._from_config(config, attn_implementation=attention) if family != "bloom" else kind(config)
    return model.double()


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "opt"])
def test_masks_over_heads_are_divided_by_heads(family: str, attention: str, tp: int) -> None:
    """What was found has been tried: the ranks together returned what the whole block did with the same masks."""
    model = model_of(family, attention)
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}
    plan = plan_sharding(model, trace(model, example=batch), batch, tp)
    heads = 8 if family == "llama" else 4
    mine = tuple(((rank * heads // tp, (rank + 1) * heads // tp),) for rank in range(tp))
    for split in plan.blocks.values():
        assert split.draws[0] == Slices(dim=1, size=heads, parts=mine)
        assert set(split.draws[1:]) <= {None} and len(split.draws) == (1 if family == "llama" else 3)


def test_a_result_that_is_none_keeps_no_mask_from_being_divided() -> None:
    """T5's encoder has None where its decoder's blocks return the positions of the cross-attention."""
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).double()
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.ones(2, 6, dtype=torch.long)}
    plan = plan_sharding(model, trace(model, example=batch), batch, 2)
    heads, neurons = (Slices(dim=dim, size=n, parts=(((0, n // 2),), ((n // 2, n),))) for dim, n in ((1, 4), (2, 48)))
    for name, split in plan.blocks.items():
        attention = [heads, None] * (2 if "decoder" in name else 1)
        assert split.draws == (*attention, neurons, None), name


class Windows(nn.Module):
    """Attention within windows of four; samples, windows and heads lie in one dimension (SAM, GOT-OCR 2)."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 4, x.shape[-1])
        parts = self.qkv(windows).reshape(len(windows), 4, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.reshape(3, len(windows) * self.heads, 4, -1).unbind(0)
        weights = F.dropout((query @ key.transpose(-2, -1)).softmax(-1), 0.2, self.training)
        mixed = (weights @ value).view(len(windows), self.heads, 4, -1).transpose(1, 2)
        return x + self.proj(mixed.reshape(*x.shape[:-1], -1))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Windows() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("samples", [1, 3])
def test_heads_are_found_behind_samples_and_windows(samples: int) -> None:
    model, batch = Stack().double(), {"x": torch.randn(samples, 12, 16).double()}
    plan = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    assert plan.blocks["layers.0"].draws == (Slices(dim=0, size=4, parts=(((0, 2),), ((2, 4),))),)


def test_a_draw_that_was_not_there_when_the_block_was_split_is_refused() -> None:
    draw = Slices(dim=1, size=4, parts=(((0, 2),), ((2, 4),)))
    with ShardRandom([draw], 0, lambda: True):
        torch.rand(2, 2)
        with pytest.raises(Fold3dError, match=r"size \(2, 3\) are drawn, as number 2 .* set tp=1"):
            torch.rand(2, 3)
    with ShardRandom([draw], 0, lambda: True), pytest.raises(Fold3dError, match="as number 1"):
        torch.rand(2, 3)  # three is no multiple of the rank's two units
    with ShardRandom([], 0, lambda: False):
        assert torch.rand(2, 3).shape == (2, 3)


def test_chances_of_0_are_known_too() -> None:
    """They may become others later."""
    config = hf.LlamaConfig(**TEXT, **WIDE, intermediate_size=48, num_attention_heads=4)
    model = hf.LlamaForCausalLM(config)
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}
    plan = plan_sharding(model, trace(model, example=batch), batch, 2)
    heads = Slices(dim=1, size=4, parts=(((0, 2),), ((2, 4),)))
    assert all(split.groups and split.draws == (heads,) for split in plan.blocks.values())


@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_takes_its_units(times: int) -> None:
    """Also where they repeat along the dimension, and lie apart."""
    draw = Slices(dim=1, size=4, parts=(((0, 1), (2, 3)), ((1, 2), (3, 4))))
    torch.manual_seed(3)
    whole = torch.rand(2, times * 4, 5)
    after = torch.rand(1)
    for rank, units in enumerate(([0, 2], [1, 3])):
        torch.manual_seed(3)
        with ShardRandom([draw, None], rank, lambda: True):
            mine = torch.rand(2, times * 2, 5)
            alike = torch.rand(1)
        expected = whole.view(2, times, 4, 5)[:, :, units].reshape(2, times * 2, 5)
        assert torch.equal(mine, expected) and torch.equal(alike, after)


def test_rows_of_which_nobody_knows_whose_they_are_are_refused() -> None:
    """Also where there are no more of them than samples."""
    mode = RowsRandom(torch.Size([8, 4, 16]), 1, 8, 2, 0, lambda: False)
    with mode, pytest.raises(Fold3dError, match="it is not known which of the whole sequence's"):
        torch.rand(4)
    with mode:
        assert torch.rand(8, 1, 1).shape == (8, 1, 1), "a number for each sample"
