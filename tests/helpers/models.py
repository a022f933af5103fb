"""Tiny models of each supported kind: seconds matter, so hidden sizes are 16-32 and vocabularies 64-128.

Every builder takes the same words, so that a test can be parametrised over `MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BeitConfig,
    BertConfig,
    BloomConfig,
    DebertaV2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    ViTConfig,
)

VOCABULARY = 64
POSITIONS = 64
IMAGE = 8
"""Height and width of images in pixels."""
CLASSES = 5
"""Of images."""


def gpt2_config(
    *,
    layers: int = 4,
    hidden: int = 16,
    vocab: int = VOCABULARY,
    dropout: float = 0.0,
    tied: bool = True,
    heads: int = 2,
) -> GPT2Config:
    """Returns a GPT-2 configuration; `tied`: lm_head and wte are one tensor."""
    return GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        vocab_size=vocab,
        n_positions=POSITIONS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def llama_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = False
) -> LlamaConfig:
    """Returns a Llama configuration with grouped-query attention (4 heads, 2 key-value heads)."""
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=POSITIONS,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def opt_config(
    *,
    layers: int = 4,
    hidden: int = 16,
    vocab: int = VOCABULARY,
    dropout: float = 0.0,
    tied: bool = True,
    heads: int = 2,
) -> OPTConfig:
    """Returns an OPT configuration (learned positions computed from the attention mask)."""
    return OPTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=2 * hidden,
        num_attention_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=POSITIONS,
        dropout=dropout,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def bert_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = True
) -> BertConfig:
    """Returns a BERT configuration with four heads (normalised after each sum, two embeddings beside the words')."""
    return BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        vocab_size=vocab,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied,
    )


def deberta_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = True
) -> DebertaV2Config:
    """Returns a DeBERTa-v2 configuration with four heads (its stack returns every block's hidden state)."""
    return DebertaV2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        vocab_size=vocab,
        max_position_embeddings=POSITIONS,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied,
    )


def gpt_neox_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = False
) -> GPTNeoXConfig:
    """Returns a GPT-NeoX configuration (one matrix for queries, keys and values, head after head; parallel blocks)."""
    return GPTNeoXConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        vocab_size=vocab,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def bloom_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = True
) -> BloomConfig:
    """Returns a Bloom configuration (no positions, but slopes per head: ALiBi)."""
    return BloomConfig(
        n_layer=layers,
        hidden_size=hidden,
        n_head=4,
        vocab_size=vocab,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def mixture_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = False
) -> MixtralConfig:
    """Returns a Mixtral configuration: of four gated experts each token goes to two, whose order nobody notices."""
    return MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
        vocab_size=vocab,
        max_position_embeddings=POSITIONS,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def t5_config(
    *, layers: int = 4, hidden: int = 16, vocab: int = VOCABULARY, dropout: float = 0.0, tied: bool = True
) -> T5Config:
    """Returns a T5 configuration: half of the layers encode, the others decode; one block's position bias is all's."""
    return T5Config(
        num_layers=layers // 2,
        num_decoder_layers=layers - layers // 2,
        d_model=hidden,
        d_kv=hidden // 4,
        d_ff=2 * hidden,
        num_heads=4,
        vocab_size=vocab,
        relative_attention_num_buckets=8,
        dropout_rate=dropout,
        tie_word_embeddings=tied,
        pad_token_id=1,
        eos_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )


def vit_config(*, layers: int = 4, hidden: int = 16, dropout: float = 0.0, tied: bool = False) -> ViTConfig:
    """Returns a vision transformer's configuration: images of four patches; nothing in it can be tied."""
    return ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        image_size=IMAGE,
        patch_size=IMAGE // 2,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
    )


def beit_config(*, layers: int = 4, hidden: int = 16, dropout: float = 0.0, tied: bool = False) -> BeitConfig:
    """Returns a BEiT's configuration: as `vit_config`, whose code caches an index of relative positions."""
    return BeitConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        image_size=IMAGE,
        patch_size=IMAGE // 2,
        num_labels=CLASSES,
        use_relative_position_bias=True,
        out_indices=[1],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )


def build(
    config: PretrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Returns the language model of `config` in train mode; device="meta" allocates nothing.

    The values are drawn in float32 and then cast, so float64 tests compare against the same numbers.
    Biases and norms, which stock initialisation leaves at 0 and 1, get noise: mistakes in them must show. GPT-2 says
    what its loss is: without that the stock Trainer, many a test's reference, divides it by other labels than it reads.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config)
        if kind is AutoModelForCausalLM and model.loss_type is None:
            model.loss_type = "ForCausalLM"
        if device != "meta":
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()


class PlainBlock(nn.Module):
    """Pre-norm residual two-layer perceptron over [batch, length, hidden]; a running mean mixes positions."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        mixed = self.norm(x).cumsum(1) / count
        out: Tensor = x + self.drop(self.down(torch.tanh(self.up(mixed))))
        return out


class PlainModel(nn.Module):
    """A language model that owes nothing to transformers; its forward returns the mean loss."""

    loss_type = "ForCausalLM"  # its first label of a row is no target

    def __init__(
        self,
        *,
        layers: int = 4,
        hidden: int = 16,
        vocab: int = VOCABULARY,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(PlainBlock(hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def build_plain(
    *,
    layers: int = 4,
    hidden: int = 16,
    vocab: int = VOCABULARY,
    dropout: float = 0.0,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PlainModel:
    """Returns a PlainModel in train mode with values drawn from `seed`."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = PlainModel(layers=layers, hidden=hidden, vocab=vocab, dropout=dropout, tied=tied)
    return model.to(dtype).train()


class Squares(nn.Module):
    """[samples, 16] through `layers` whose graphs keep a tensor of their own; returns the mean square of the last."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def returned_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A loss function for models that return their loss."""
    loss: Tensor = model(**batch)
    return loss


MODELS: dict[str, Callable[..., PretrainedConfig]] = {
    "gpt2": gpt2_config,
    "llama": llama_config,
    "opt": opt_config,
}
"""Name -> configuration builder of every HuggingFace family the suite runs."""
