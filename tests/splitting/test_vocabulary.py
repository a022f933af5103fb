"""The proof of a vocabulary's split: what would be wrong stays whole, with the reason; plans have what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.sharding.vocabulary import find_vocabulary
from fold3d.splitting.plan_sharding import plan_sharding
from fold3d.splitting.prove_vocabulary import prove_vocabulary
from fold3d.trace import trace
from tests.trace import zoo


class Scaled(nn.Embedding):
    """Right in parts: each row is made from itself."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, padding_idx=rows - 2)
        self.register_buffer("scale", torch.tensor(width**0.5).double())

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input) * self.scale)


class WidthOfItsOwn(Scaled):
    """Works only with all columns."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).unflatten(-1, (4, self.embedding_dim // 4)).flatten(-2) + torch.zeros(
            self.embedding_dim
        )


class Normed(nn.Embedding):
    """Wrong in parts: depends on all rows."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.weight.norm()


class OtherLookup(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return self.weight[input]


class Centred(nn.Linear):
    """Wrong in parts: takes the mean over its outputs."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out + out.mean(-1, keepdim=True).square()


class ScaledHead(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / 2) * 3


def model(embedding: type[nn.Embedding] = nn.Embedding, head: type[nn.Linear] = nn.Linear) -> nn.Module:
    made: Any = zoo.Plain()
    made.embedding = embedding(61, 16)
    made.head = head(16, 61)
    return made.double().train()


def reasons(made: nn.Module, tp: int) -> tuple[set[str], dict[str, str]]:
    example = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    recording = trace(made, example=example)
    found = prove_vocabulary(made, find_vocabulary(made, recording, tp, example), tp)
    return {*found.embeddings, *found.heads}, dict(found.reasons)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("embedding", [nn.Embedding, Scaled, WidthOfItsOwn])
@pytest.mark.parametrize("head", [nn.Linear, ScaledHead])
def test_what_is_right_is_spread(embedding: type[nn.Embedding], head: type[nn.Linear], tp: int) -> None:
    assert reasons(model(embedding, head), tp)[0] == {"embedding", "head"}


@pytest.mark.parametrize("embedding", [Normed, OtherLookup])
def test_an_embedding_that_would_be_wrong_stays_whole(embedding: type[nn.Embedding]) -> None:
    found, why = reasons(model(embedding), 3)
    assert found == {"head"} and why["embedding"].startswith("whole: divided, ")


def test_a_head_that_would_be_wrong_stays_whole() -> None:
    found, why = reasons(model(head=Centred), 2)
    assert found == {"embedding"} and "something else" in why["head"]


def test_what_is_tied_stays_whole_together() -> None:
    made: Any = model(head=Centred)
    made.head.weight = made.embedding.weight
    found, why = reasons(made, 2)
    assert not found and why["embedding"] == why["head"]


def on_meta(made: nn.Module) -> nn.Module:
    return made.to("meta")


@pytest.mark.parametrize("where", [lambda made: made, on_meta], ids=["real", "meta"])
def test_plans(where: Callable[[nn.Module], nn.Module]) -> None:
    made = where(zoo.build("llama"))
    example = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    plan = plan_sharding(made, trace(made, example=example), example, 2)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(plan.shards)
    assert set(plan.vocabulary.embeddings) == {"model.embed_tokens"} and set(plan.vocabulary.heads) == {"lm_head"}
    without = plan_sharding(made, trace(made, example=example), example, 2, {"lm_head": "replicate"})
    assert "lm_head.weight" not in without.shards and "model.embed_tokens.weight" in without.shards
    assert without.vocabulary.reasons["lm_head"] == 'whole: tp_plan says "replicate"'
