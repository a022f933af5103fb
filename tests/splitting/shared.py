"""A model as all ranks of an emulated tensor-parallel group, compared with the model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.vocabulary import Vocabulary
from fold3d.splitting.emulate import EmulatedGroup, EmulatedOps
from fold3d.splitting.torch_modes import DoubleMode
from fold3d.tensor_parallel.install import install
from fold3d.tensor_parallel.region import RegionOps
from fold3d.trace.coat import Coat


def blocks_of(plan: ShardingPlan) -> ShardingPlan:
    """Returns the plan without the vocabulary's part."""
    around = set(plan.vocabulary.shards)
    shards = {name: spread for name, spread in plan.shards.items() if name not in around}
    return dataclasses.replace(plan, shards=shards, vocabulary=Vocabulary())


def shard(model: nn.Module, plan: ShardingPlan, rank: int) -> nn.Module:
    """Returns a copy of `model` with a rank's parts of its parameters."""
    made = copy.deepcopy(model)
    for name, parameter in made.named_parameters():
        parameter.grad = None
        spread = plan.shard_of(name)
        if spread is not None:
            parameter.data = spread.take(parameter.data, rank)
    return made


def result_of(output: Any) -> Tensor:
    """Returns one number that depends on all that a model returns."""
    loss = getattr(output, "loss", None)
    return loss if loss is not None else (output[0] * torch.linspace(-1, 1, output[0].shape[-1]).double()).sum()


def gradients_of(models: list[nn.Module], plan: ShardingPlan, name: str) -> list[Tensor | None]:
    """Returns each rank's gradient of a parameter, summed where ranks have different shares of it."""
    found = [model.get_parameter(name).grad for model in models]
    spread = plan.shard_of(name)
    if spread is None or not spread.summed:
        return found
    return [
        sum((found[other] for other in spread.holders(rank) if found[other] is not None), torch.zeros(()))
        for rank in range(plan.tp)
    ]


def saved_bytes(model: nn.Module, batch: dict[str, Tensor], plan: ShardingPlan) -> float:
    """Returns what a rank keeps for the backward beside parameters, in the mean."""
    plan = blocks_of(plan)
    ranks = [shard(model, plan, rank) for rank in range(plan.tp)]
    weights = {parameter.untyped_storage()._cdata for made in ranks for parameter in made.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return x

    def as_rank(ops: Any) -> Tensor:
        install(Coat(), ranks[ops.rank], plan, ops.rank, ops)
        return result_of(ranks[ops.rank](**batch))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        EmulatedGroup(plan.tp).run(as_rank)
    return sum(storage.nbytes() for storage in kept.values()) / plan.tp


def compare(
    model: nn.Module,
    batch: dict[str, Tensor],
    plan: ShardingPlan,
    over: Callable[[EmulatedOps], RegionOps] = lambda x: x,
    result: Callable[[Any], Tensor] = result_of,
) -> float:
    """Returns the largest difference of loss and gradients between `model` and the ranks that share its blocks.

    Args:
        over: what the ranks run with.
        result: the loss, of what the model returns.
    """
    plan = blocks_of(plan)
    model.zero_grad(set_to_none=True)
    with DoubleMode():
        whole = result(model(**batch))
    whole.backward()
    ranks = [shard(model, plan, rank) for rank in range(plan.tp)]

    def as_rank(ops: EmulatedOps) -> Tensor:
        install(Coat(), ranks[ops.rank], plan, ops.rank, over(ops))
        return result(ranks[ops.rank](**batch))

    with DoubleMode():
        losses = EmulatedGroup(plan.tp).run(as_rank)
    torch.stack(losses).sum().backward()
    worst = max(float((loss - whole).detach().abs()) for loss in losses)
    for name, parameter in model.named_parameters():
        spread = plan.shard_of(name)
        for rank, gradient in enumerate(gradients_of(ranks, plan, name)):
            if parameter.grad is None:
                assert gradient is None
                continue
            assert gradient is not None, name
            expected = parameter.grad if spread is None else spread.take(parameter.grad, rank)
            worst = max(worst, float((gradient - expected).abs().max()))
    return worst
