"""Small models of every family that the trace component supports, in fp64, and batches for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 64
_WITHOUT_VOCABULARY = dict(  # noqa: C408
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
_COMMON = {"vocab_size": VOCABULARY, **_WITHOUT_VOCABULARY}


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_key_value_heads=2, attention_dropout=dropout))


def _llama_tied(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True, attention_dropout=dropout))


def _opt(dropout: float) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=48,
            max_position_embeddings=64, word_embed_proj_dim=16, dropout=dropout, attention_dropout=dropout,
        )
    )  # fmt: skip


def _qwen2(dropout: float) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, num_key_value_heads=2, attention_dropout=dropout))


def _qwen3(dropout: float) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_COMMON, num_key_value_heads=2, head_dim=8, attention_dropout=dropout, use_sliding_window=True,
        sliding_window=8, max_window_layers=2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _gpt_neox(dropout: float) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**_COMMON, hidden_dropout=dropout, attention_dropout=dropout))


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_COMMON, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))


def _of(name: str, **config: Any) -> Callable[[float], nn.Module]:
    """A causal or masked language model of transformers by the name of its class, without dropout."""

    def make(dropout: float) -> nn.Module:
        import transformers

        model_class = getattr(transformers, name)
        return model_class(model_class.config_class(vocab_size=VOCABULARY, **config))

    return make


FURTHER: dict[str, Callable[[float], nn.Module]] = {
    "gemma2": _of("Gemma2ForCausalLM", **_WITHOUT_VOCABULARY, num_key_value_heads=2, head_dim=8),
    "phi": _of("PhiForCausalLM", **_WITHOUT_VOCABULARY),
    "bloom": _of("BloomForCausalLM", hidden_size=32, n_layer=4, n_head=4),
    "gpt_j": _of(
        "GPTJForCausalLM", n_positions=64, n_embd=32, n_layer=4, n_head=4, rotary_dim=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "falcon": _of("FalconForCausalLM", hidden_size=32, num_hidden_layers=4, num_attention_heads=4),
    "mpt": _of("MptForCausalLM", d_model=32, n_layers=4, n_heads=4, max_seq_len=64),
}  # fmt: skip
"""More of transformers' models: recorded and cut once each, not through every test."""

FAMILIES: dict[str, Callable[[float], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "llama_tied": _llama_tied,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
}


def build(family: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return {**FAMILIES, **FURTHER}[family](dropout).double().train()


def tokens(batch_size: int = 2, length: int = 12, *, padded: bool = False, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch_size, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, length - 4 :] = 0
        batch["attention_mask"] = mask
        batch["labels"][0, length - 4 :] = -100
    return batch


class Block(nn.Module):
    """A residual block; `style` is how it returns its result."""

    def __init__(self, width: int, style: str = "tensor", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.style = style

    def forward(self, x: Any) -> Any:
        if isinstance(x, tuple):
            x = x[0]
        if self.style == "in_place":
            x += self.dropout(self.down(torch.tanh(self.up(self.norm(x.clone())))))
            return x
        y = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        if self.style == "constants":
            return y, None, 7
        if self.style == "pair":
            return y, (y * 2).tanh()
        return y


class Plain(nn.Module):
    """A root with embeddings, its own parameters, a ModuleList, code between the blocks and a tied head."""

    def __init__(self, style: str = "tensor", dropout: float = 0.0, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(64, width))
        self.scale = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(Block(width, style, dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.style = style
        self.dropout = dropout

    def between(self, x: Any) -> Any:
        if self.style == "pair":
            return x[0] + 0.1 * x[1]
        if self.style == "constants":
            assert x[1] is None and x[2] == 7
            return x[0]
        if self.style == "in_place":
            return x
        x = x * self.scale
        return torch.nn.functional.dropout(x, self.dropout, self.training)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        for layer in self.layers:
            x = self.between(layer(x))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def plain(style: str = "tensor", dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Plain(style, dropout).double().train()


class Checkpointed(Plain):
    """Plain that calls torch.utils.checkpoint around every `every` blocks itself."""

    def __init__(self, dropout: float = 0.0, *, every: int = 1, reentrant: bool = False) -> None:
        super().__init__("tensor", dropout)
        self.every = every
        self.reentrant = reentrant

    def some(self, first: int, x: Tensor) -> Tensor:
        for layer in self.layers[first : first + self.every]:
            x = self.between(layer(x))
        return x

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        for first in range(0, len(self.layers), self.every):
            x = checkpoint(functools.partial(self.some, first), x, use_reentrant=self.reentrant)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def checkpointed(dropout: float = 0.0, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(dropout, **kwargs).double().train()
