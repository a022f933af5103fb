"""Runs a split model chunk after chunk in one process, as the ranks of a pipeline would, and gathers loss and
gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.placement.layers import chunk_parameters
from fold3d.stage.split_model import SplitModel
from fold3d.trace import Trace, trace
from fold3d.weights.release import release

Ranges = list[tuple[int, int]]
FIRST_SEED = 1000
"""Of the generator when the first chunk of `chained` begins."""


def needed_parameters(model: nn.Module, recorded: Trace, ranges: Ranges, chunk: int) -> list[str]:
    """All names of the parameters that a chunk needs."""
    return chunk_parameters(
        [name for name, _ in model.named_parameters(remove_duplicate=False)], recorded, ranges, chunk
    )


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def whole(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model."""
    model.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def cuts(num_blocks: int) -> list[Ranges]:
    """Every cut in two, and one chunk per block."""
    pairs = [[(0, c), (c, num_blocks)] for c in range(1, num_blocks)]
    return [*pairs, [(i, i + 1) for i in range(num_blocks)]]


def ranks_of(model: nn.Module, recorded: Trace, ranges: Ranges, pp: int, recompute: bool = False) -> list[SplitModel]:
    """One SplitModel per stage on a copy of `model` that holds only the stage's parameters."""
    ranks = []
    for stage in range(pp):
        local = copy.deepcopy(model)
        keep = {n for v in range(stage, len(ranges), pp) for n in needed_parameters(local, recorded, ranges, v)}
        release(local, keep)
        ranks.append(SplitModel(local, recorded, ranges, recompute=recorded.blocks if recompute else ()))
    return ranks


def chained(
    ranks: Sequence[SplitModel],
    recorded: Trace,
    num_chunks: int,
    batch: dict[str, Tensor],
    *,
    key: tuple[int, int, int] | None = None,
    call: Callable[[nn.Module, dict[str, Tensor]], Any] | None = None,
    only_loss: bool = False,
    sent: list[list[Tensor]] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one micro-batch that passes all chunks forward, then backward; gradients of all
    stages summed. `sent` is given what crossed each border."""
    call = call or (lambda model, batch: model(**batch))
    for rank in ranks:
        rank._model.zero_grad()
    links: list[tuple[list[Tensor], list[Tensor]]] = []
    inputs: list[Tensor] = []
    result: Any = None
    for chunk in range(num_chunks):
        rank = ranks[chunk % len(ranks)]
        torch.manual_seed(FIRST_SEED + chunk)  # no rank's generator is like another's
        outputs, result = rank.run(chunk, lambda rank=rank: call(rank._model, batch), inputs, key, only_loss=only_loss)
        links.append((outputs, inputs))
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in outputs]
    if sent is not None:
        sent += [[one.detach() for one in outputs] for outputs, _ in links[:-1]]
    loss = loss_of(result)
    loss.backward()
    for chunk in reversed(range(num_chunks - 1)):
        outputs = links[chunk][0]
        received = links[chunk + 1][1]
        pairs = [(o, r.grad) for o, r in zip(outputs, received, strict=True) if o.requires_grad and r.grad is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return loss.detach(), gradients(ranks, recorded)


def gradients(ranks: Sequence[SplitModel], recorded: Trace) -> dict[str, Tensor]:
    canonical = recorded.canonical()
    total: dict[str, Tensor] = {}
    for rank in ranks:
        for name, parameter in rank._model.named_parameters():
            if parameter.grad is not None:
                name = canonical.get(name, name)
                total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
    return total


def assert_equal(
    got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], tolerance: float = 1e-14
) -> None:
    assert got[1].keys() == want[1].keys()
    scale = max(1.0, *(float(g.abs().max()) for g in want[1].values()))
    assert abs(float(got[0] - want[0])) <= tolerance * max(1.0, abs(float(want[0])))
    for name, gradient in want[1].items():
        assert float((got[1][name] - gradient).abs().max()) <= tolerance * scale, name


def record(model: nn.Module, batch: dict[str, Tensor] | None = None, blocks: str = "auto") -> Trace:
    return trace(model, blocks=blocks, example=batch)
