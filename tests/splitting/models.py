"""Tiny models of many families in double precision, each with a batch and the names of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from fold3d.trace import Trace
from fold3d.trace.capture import trace_call

VOCABULARY = 96
_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Tiny:
    """A model, what its forward takes, and its blocks."""

    model: nn.Module
    batch: dict[str, Tensor]
    blocks: list[str]

    def trace(self) -> Trace:
        """Records the model."""
        return trace_call(self.model, self.blocks, self.batch)


def _gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            **_TEXT, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def _llama(heads: int = 8, kv: int = 4, hidden: int = 32) -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **_TEXT, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
            num_key_value_heads=kv,
        )
    )  # fmt: skip


def _opt() -> Any:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            **_TEXT, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, dropout=0,
        )
    )  # fmt: skip


def _bert() -> Any:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            **_TEXT, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def _gpt_neox() -> Any:
    return hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(
            **_TEXT, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def _bloom() -> Any:
    return hf.BloomForCausalLM(
        hf.BloomConfig(**_TEXT, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0, attention_dropout=0)
    )


def _t5_encoder() -> Any:
    config = hf.T5Config(**_TEXT, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0)
    return hf.T5EncoderModel(config)


def _t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            **_TEXT, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def _vit() -> Any:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8,
            patch_size=4, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def _qwen3() -> Any:
    return hf.Qwen3ForCausalLM(
        hf.Qwen3Config(
            **_TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=8,
        )
    )  # fmt: skip


def _phi3() -> Any:
    return hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **_TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4,
        )
    )  # fmt: skip


def _olmo2() -> Any:
    return hf.Olmo2ForCausalLM(
        hf.Olmo2Config(
            **_TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4,
        )
    )  # fmt: skip


def _falcon(**layout: Any) -> Any:
    config = hf.FalconConfig(
        **_TEXT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0, attention_dropout=0,
        **layout,
    )  # fmt: skip
    return hf.FalconForCausalLM(config)


def _gptj() -> Any:
    return hf.GPTJForCausalLM(
        hf.GPTJConfig(
            **_TEXT, n_positions=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0,
        )
    )  # fmt: skip


def _mpt() -> Any:
    return hf.MptForCausalLM(hf.MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=32))


def _deepseek() -> Any:
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **_TEXT, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=9, kv_lora_rank=8, q_lora_rank=12,
            qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
        )
    )  # fmt: skip


def _mixtral() -> Any:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **_TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, num_local_experts=4, experts_implementation="batched_mm",
        )
    )  # fmt: skip


def _qwen3_moe() -> Any:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **_TEXT, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=4, head_dim=8, num_experts=4, num_experts_per_tok=2,
            experts_implementation="batched_mm",
        )
    )  # fmt: skip


def _gpt_oss() -> Any:
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            experts_implementation="batched_mm",
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "opt": _opt,
    "bert": _bert,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "t5": _t5,
    "t5_encoder": _t5_encoder,
    "vit": _vit,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "falcon_groups": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon_mqa": lambda: _falcon(new_decoder_architecture=False, multi_query=True, alibi=False, parallel_attn=True),
    "falcon_alibi": lambda: _falcon(new_decoder_architecture=False, multi_query=False, alibi=True, parallel_attn=False),
    "gptj": _gptj,
    "mpt": _mpt,
    "llama_mqa": lambda: _llama(4, 1),
    "llama_kv2": lambda: _llama(8, 2, 64),
    "deepseek": _deepseek,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
}
"""Name -> a model with two or three blocks, no dropout, its own attention."""


def build(name: str) -> Tiny:
    """Returns a model of `FAMILIES` in double precision, with random weights, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[name]().double().train()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                norm = parameter.dim() == 1 and "bias" not in key
                parameter.copy_(torch.randn_like(parameter) * 0.15 + float(norm))
        for module in model.modules():
            if getattr(getattr(module, "config", None), "use_cache", None):
                module.config.use_cache = False
        ids = torch.randint(1, VOCABULARY, (2, 6))
        batch = {"input_ids": ids, "labels": ids}
        if name == "vit":
            batch = {"pixel_values": torch.randn(2, 3, 8, 8).double(), "labels": torch.tensor([1, 3])}
        if name == "t5_encoder":
            batch = {"input_ids": ids}
    lists = [
        key
        for key, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any("ttention" in type(m).__name__ for m in module.modules())
    ]
    outer = [key for key in lists if not any(key.startswith(f"{other}.") for other in lists)]
    blocks = [f"{key}.{number}" for key in outer for number in range(len(model.get_submodule(key)))]
    return Tiny(model, batch, blocks)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.mT / 2).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Attention(nn.Module):
    """A block that returns its attention weights beside its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(16), _Heads()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        added, weights = self.heads(self.norm(x))
        return x + added, weights
