"""Models with a vocabulary of an odd size, what is computed of them in parts, and the comparison with the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fold3d.sharding.vocabulary import Vocabulary, find_vocabulary
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.vocabulary import install_vocabulary
from fold3d.trace import trace
from fold3d.trace.coat import Coat
from tests.tensor_parallel.vocabulary.emulated import NothingWhole
from tests.trace import zoo

V = 67
"""A prime that is the size of nothing else in these models."""


def build(family: str) -> nn.Module:
    model = gemma3() if family == "gemma3" else zoo.build(family)
    model.resize_token_embeddings(V, mean_resizing=False)
    for parameter in model.parameters():  # biases and norms that are zeros and ones would hide mistakes
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.1)
    return model.double().train()


def gemma3() -> nn.Module:
    """Embeddings of a class of their own, which scales them."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=48, max_position_embeddings=40,
        )
    )  # fmt: skip


def batch(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, V, (2, 9), generator=generator)
    ids[0, :3] = torch.tensor([0, 1, V - 1])  # whatever is the padding's
    labels = ids.clone()
    labels[1, 4:] = -100
    return {"input_ids": ids, "labels": labels}


def stock_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """As the Trainer calls it: the sum over labels, by their number; computed in fp32."""
    return model(**inputs, num_items_in_batch=torch.tensor(11)).loss


def exact_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=inputs["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def confident_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """A loss that looks at what only whole logits have."""
    outputs = model(input_ids=inputs["input_ids"])
    return exact_loss(model, inputs) - 0.1 * outputs.logits.topk(2, -1).values.mean()


def cut(model: nn.Module, vocabulary: Vocabulary, rank: int) -> None:
    for name, parameter in model.named_parameters():
        if name in vocabulary.shards:
            parameter.data = vocabulary.shards[name].take(parameter.data, rank)


def train_once(family: str) -> tuple[dict[str, Tensor], ...]:
    """On each rank of a group: loss and gradients, in fp64 and by the model's own loss."""
    ops = TensorParallelGroup(dist.group.WORLD)
    model, inputs = build(family), batch(family)
    vocabulary = find_vocabulary(model, trace(model), ops.size)
    cut(model, vocabulary, ops.rank)
    install_vocabulary(Coat(), model, vocabulary, ops)
    found = []
    for loss_of in (exact_loss, stock_loss):
        model.zero_grad()
        with NothingWhole(V):
            loss = loss_of(model, inputs)
            loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    return tuple(found)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(
    model: nn.Module,
    inputs: dict[str, Tensor],
    loss_of: Callable[..., Tensor],
    vocabulary: Vocabulary,
    results: list[dict[str, Tensor]],
    tolerance: float,
) -> None:
    """Compares every rank's loss and gradients with those of `model`, and replicated ones among ranks to the bit."""
    whole = copy.deepcopy(model)
    loss = loss_of(whole, inputs)
    loss.backward()
    wanted: dict[str, Any] = {"loss": loss.detach(), **gradients(whole)}
    for rank, found in enumerate(results):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            shard = vocabulary.shards.get(name)
            expected = wanted[name] if shard is None else shard.take(wanted[name], rank)
            torch.testing.assert_close(
                value, expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name} {text}"
            )
            assert shard is not None or torch.equal(value, results[0][name])
