"""prove_vocabulary(): that ranks which share an embedding or an output head compute what the whole one computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fold3d.sharding.shard import Shard
from fold3d.sharding.vocabulary import Vocabulary
from fold3d.splitting.emulate import EmulatedGroup, EmulatedOps
from fold3d.splitting.proof import TOLERANCE
from fold3d.tensor_parallel.vocabulary import install_vocabulary
from fold3d.trace.coat import Coat, copy_without_coat
from fold3d.trace.wrappers import drop_hooks, users_hooks

_WIDTH = 8
"""Columns of the tables that are compared: what a row holds is looked up and multiplied alike, however long it is."""
_MOST = 1 << 26
"""Elements of a table whose class does not work with fewer columns."""


def prove_vocabulary(model: nn.Module, vocabulary: Vocabulary, tp: int) -> Vocabulary:
    """Returns what of the vocabulary's split gives what the whole gives; the rest stays whole, with the reason.

    All ranks run on this process, with random weights in double precision: results of the embedding, loss of the head,
    and the gradients of weights and inputs are compared. Tied modules stay together.
    """
    wrong: dict[str, str] = {}
    for name, shard in vocabulary.embeddings.items():
        wrong[name] = _differs(
            model.get_submodule(name), Vocabulary(embeddings={"": shard}), shard, _look_up(shard, tp)
        )
    for name, shard in vocabulary.heads.items():
        wrong[name] = _differs(model.get_submodule(name), Vocabulary(heads={"": shard}), shard, _loss(shard))
    failed = {name: f"whole: divided, {text}" for name, text in wrong.items() if text}
    return vocabulary.without(model, failed)


_Use = Callable[[nn.Module, int], tuple[Tensor, list[Tensor]]]
"""(module, width) -> what it computes, reduced to a number, and the inputs that have gradients."""


def _look_up(shard: Shard, tp: int) -> _Use:
    edges = [entry for rank in range(tp) for first, end in shard.parts[rank] for entry in (first, end - 1)]

    def use(module: nn.Module, width: int) -> tuple[Tensor, list[Tensor]]:
        draw = torch.Generator().manual_seed(7)
        ids = torch.cat([torch.randint(0, shard.size, (32,), generator=draw), torch.tensor(edges)])
        padding: Any = getattr(module, "padding_idx", None)
        ids = torch.cat([ids, ids[:3] if padding is None else torch.full((3,), padding)])[None]
        found = module(ids)
        return (found * torch.randn(found.shape, dtype=found.dtype, generator=draw)).sum(), []

    return use


def _loss(shard: Shard) -> _Use:
    def use(module: nn.Module, width: int) -> tuple[Tensor, list[Tensor]]:
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(1, 16, width, dtype=torch.float64, generator=draw).requires_grad_()
        labels = torch.randint(0, shard.size, (1, 16), generator=draw)
        labels[0, :3] = torch.tensor([0, shard.size - 1, -100])
        return functional.cross_entropy(module(x).flatten(0, 1), labels.flatten()), [x]

    return use


def _differs(module: nn.Module, alone: Vocabulary, shard: Shard, use: _Use) -> str:
    """Returns an empty text, or in what the ranks' parts of a module differ from the whole."""
    rows, full = module.weight.shape  # type: ignore[misc]
    for width in dict.fromkeys((min(_WIDTH, full), full)):
        if rows * width > _MOST and width > _WIDTH:
            return f"its class works only with all of its {full} columns, too many to prove it"
        try:
            values = _values(module, width)
            whole = _twin(module, values, Tensor.clone)
            expected, inputs = use(whole, width)
        except Exception as error:
            if width == full:
                return f"it cannot be run alone ({type(error).__name__}: {error})"
            continue
        expected.backward()  # type: ignore[no-untyped-call]
        return _compare(module, alone, shard, use, width, values, whole, [expected.detach(), *(x.grad for x in inputs)])
    return ""


def _compare(
    module: nn.Module,
    alone: Vocabulary,
    shard: Shard,
    use: _Use,
    width: int,
    values: dict[str, Tensor],
    whole: nn.Module,
    expected: list[Any],
) -> str:
    twins = [_twin(module, values, partial(shard.take, rank=rank)) for rank in range(shard.ranks)]

    def as_rank(ops: EmulatedOps) -> tuple[Tensor, list[Tensor]]:
        install_vocabulary(Coat(), twins[ops.rank], alone, ops)
        return use(twins[ops.rank], width)

    try:
        results = EmulatedGroup(shard.ranks).run(as_rank)
        torch.stack([result for result, _ in results]).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"as {shard.ranks} ranks it raises {type(error).__name__}: {error}"
    for rank, (result, inputs) in enumerate(results):
        found = [result.detach(), *(x.grad for x in inputs)]
        if not all(_close(one, other) for one, other in zip(found, expected, strict=True)):
            return f"rank {rank} computes something else"
        for name, parameter in twins[rank].named_parameters():
            if not _close(parameter.grad, shard.take(whole.get_parameter(name).grad, rank)):  # type: ignore[arg-type]
                return f"rank {rank} has another gradient of its {name}"
    return ""


def _values(module: nn.Module, width: int) -> dict[str, Tensor]:
    """Returns random numbers in double precision for the parameters of a module."""

    def draw(name: str, parameter: nn.Parameter) -> Tensor:
        shape = (len(parameter), width) if parameter.ndim == 2 else parameter.shape
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return {name: draw(name, parameter) for name, parameter in module.named_parameters(recurse=False)}


def _twin(module: nn.Module, values: dict[str, Tensor], part: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a module with parts of these values as parameters, and no hooks of the user's."""
    memo: dict[int, Any] = {id(hook): hook for hook in users_hooks(module)}
    for name, parameter in module.named_parameters(recurse=False):
        memo[id(parameter)] = nn.Parameter(part(values[name]))
    twin = copy_without_coat(module, memo)
    drop_hooks(twin, lambda hook: True)
    for name, buffer in twin.named_buffers():
        if buffer.is_meta:
            twin._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype)
    return twin


def _close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None or found.shape != expected.shape:
        return False
    scale = max(1.0, float(expected.abs().max()))
    return bool(((found - expected).abs() <= TOLERANCE * scale).all())
