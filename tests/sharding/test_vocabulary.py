"""Which embeddings and heads are spread by entries: found in models of any kind, with the reason where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.sharding.shard import Shard
from fold3d.sharding.vocabulary import Vocabulary, find_vocabulary
from fold3d.trace import trace
from tests.trace import zoo


class Model(nn.Module):
    """A plain language model."""

    def __init__(self, rows: int = 50, outputs: int = 50, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, 16, **options)
        self.positions = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(zoo.Block(16) for _ in range(2))
        self.transform = nn.Linear(16, 16)
        self.head = nn.Linear(16, outputs)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))

    def finish(self, x: Tensor) -> Tensor:
        return self.head(self.transform(x))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.finish(x)


def find(model: nn.Module, tp: int = 3) -> Vocabulary:
    example = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    return find_vocabulary(model, trace(model, example=example), tp, example)


def test_a_plain_model() -> None:
    found = find(Model())
    assert found.shards == dict.fromkeys(["tokens.weight", "head.weight", "head.bias"], Shard.even(0, 50, 3))
    assert set(found.embeddings) == {"tokens"} and set(found.heads) == {"head"}
    assert found.reasons == {"tokens": "embedding of 50 entries", "head": "output head of 50 entries"}


def test_one_rank_needs_nothing() -> None:
    assert find(Model(), tp=1) == Vocabulary()


def test_a_head_of_classes_stays_whole() -> None:
    found = find(Model(outputs=20))
    assert set(found.shards) == {"tokens.weight"} and not found.heads


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_options_for_which_a_table_must_be_whole(option: str) -> None:
    found = find(Model(**{option: 1.0 if option == "max_norm" else True}))
    assert set(found.heads) == {"head"} and not found.embeddings
    assert f"has {option}=" in found.reasons["tokens"]


def test_a_small_vocabulary_stays_whole() -> None:
    found = find(Model(12, 12))
    assert not found.shards and "12 entries are few beside a width of 16" in found.reasons["tokens"]
    assert set(find(Model(24, 24), tp=12).heads) == {"head"} and not find(Model(24, 24), tp=13).shards


def test_tied_ones_are_spread_together_or_not_at_all() -> None:
    model = Model()
    model.head.weight = model.tokens.weight
    found = find(model)
    assert set(found.shards) == {"tokens.weight", "head.bias"} and len(found.reasons) == 2
    model = Model(sparse=True)
    model.head.weight = model.tokens.weight
    assert not find(model).shards


class ReadsItsWeight(Model):
    """As MobileBERT, whose head multiplies by the embedding's weight itself."""

    def finish(self, x: Tensor) -> Tensor:
        return super().finish(x) + x @ self.head.weight.t()


class LooksUpInside(Model):
    class Block(nn.Module):
        def __init__(self, tokens: nn.Embedding) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.tokens = tokens

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(x) @ self.tokens.weight.t() @ self.tokens.weight

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(self.tokens) for _ in range(2))


class NormedWeight(Model):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.head)


def test_weights_that_others_read() -> None:
    found = find(ReadsItsWeight())
    assert set(found.embeddings) == {"tokens"} and not found.heads
    assert found.reasons["head"] == "its weights are read by 'the model', too"
    found = find(LooksUpInside())
    assert not found.embeddings and found.reasons["tokens"] == "its weights are read by 'layers.0', too"


class OneReads(Model):
    """Its ninth block is like the others but for its number, and reads the embedding's weight."""

    class Block(zoo.Block):
        def __init__(self, number: int, tokens: nn.Embedding) -> None:
            super().__init__(16)
            self.number = number
            self.around = (tokens,)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y + self.around[0].weight[0] if self.number == 8 else y

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(number, self.tokens) for number in range(12))


def test_one_block_of_many_reads_a_weight() -> None:
    """That it is like others does not mean that it need not run to find out."""
    assert "layers.8" in find(OneReads()).reasons["tokens"]


def test_of_many_equal_blocks_a_few_run() -> None:
    class Counted(zoo.Block):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.runs += 1
            y: Tensor = super().forward(x)
            return y

    model = Model()
    model.layers = nn.ModuleList(Counted(16) for _ in range(40))
    example = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    traced = trace(model, example=example)
    Counted.runs = 0
    assert find_vocabulary(model, traced, 3, example) == find(Model())
    assert 0 < Counted.runs < 10


def test_weights_that_are_computed() -> None:
    found = find(NormedWeight())
    assert not found.heads and "makes its weight out of others" in found.reasons["head"]


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("family", [*zoo.FAMILIES, *zoo.FURTHER])
def test_every_model_of_the_zoo(family: str) -> None:
    model = zoo.build(family)
    found = find_vocabulary(model, trace(model), 2)
    parameters = dict(model.named_parameters())
    assert len(found.embeddings) == len(found.heads) == 1
    embedding, head = (model.get_submodule(next(iter(names))) for names in (found.embeddings, found.heads))
    held = {id(p) for module in (embedding, head) for p in module.parameters()}
    assert {id(parameters[name]) for name in found.shards} == held


def test_models_without_a_vocabulary() -> None:
    from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)  # noqa: C408
    vit = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=64))
    assert not find_vocabulary(vit, trace(vit), 2).shards
    bert = BertForSequenceClassification(BertConfig(**sizes, vocab_size=64, num_labels=5))
    found = find_vocabulary(bert, trace(bert), 2)
    assert set(found.shards) == {"bert.embeddings.word_embeddings.weight"}
