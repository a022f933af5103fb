"""Gradients: of tied parameters, their global norm, clipping; in `.grad`, except for `all_reduce_norm`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from fold3d.comms.groups import Groups
from fold3d.comms.world_group import WorldGroup
from fold3d.stage.rank_model import RankModel
from fold3d.topology import Topology

Tied = Mapping[str, tuple[Parameter, Any]]
"""Canonical name -> (this rank's parameter, group of the ranks of its replica that hold a copy)."""


def tied_parameters(cut: RankModel, groups: Groups, topology: Topology) -> Tied:
    """Returns the trained parameters of this rank that other ranks of its replica hold, too."""
    return {
        name: (cut.parameters[name], groups.ties[places])
        for name, places in cut.placement.shared(topology.tp_rank).items()
        if topology.holds(places) and cut.parameters[name].requires_grad
    }


def sum_tied(tied: Tied) -> None:
    """Sums the gradients of parameters that several ranks of a replica hold, in place, in the order of their names.

    Every rank of a group must call with the same names; what a group sums travels together.
    """
    by_group: dict[int, list[tuple[Parameter, Any]]] = {}
    for name in sorted(tied):
        parameter, group = tied[name]
        by_group.setdefault(id(group), []).append((parameter, group))
    for members in by_group.values():
        parameters, group = [parameter for parameter, _ in members], members[0][1]
        used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        dist.all_reduce(used, group=group)
        found = []
        for parameter, flag in zip(parameters, used.tolist(), strict=True):
            if flag and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                found.append(parameter.grad)
        reduce_joined(found, functools.partial(dist.all_reduce, group=group))


def reduce_joined(tensors: Sequence[Tensor], reduce: Callable[[Tensor], Any]) -> None:
    """Calls `reduce`, which changes a tensor in place element by element, once per dtype and device of `tensors`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        if len(alike) == 1:
            reduce(alike[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def share_first(gradient: torch.Tensor, used: list[bool], source: int, group: Any) -> None:
    """Gives the copies of one parameter's gradient the first copy's values, in place.

    Whoever changes gradients may do otherwise on each rank (noise from a generator that has been drawn from
    before), and the copies of the parameter must stay equal.

    Args:
        used: whether there is a gradient, one flag; the first copy's becomes everybody's.
        source: global rank with the first copy.
        group: the ranks with a copy.
    """
    flag = torch.tensor(used, dtype=torch.uint8)
    dist.broadcast(flag, source, group=group)
    used[:] = [bool(one) for one in flag.tolist()]
    dist.broadcast(gradient, source, group=group)


def norm_dtype(model: Module) -> torch.dtype:
    """Returns fp32, or the dtype of the model's widest parameter if that is wider.

    Of the whole model, also where a stage holds a part of it: all ranks must round the norm alike.
    """
    return functools.reduce(torch.promote_types, (parameter.dtype for parameter in model.parameters()), torch.float32)


def global_norm(cut: RankModel, dtype: torch.dtype, world: WorldGroup, *, kernel: bool = False) -> torch.Tensor:
    """Returns the L2 norm of the gradients in `.grad` of a whole replica, identical on every rank of it.

    Args:
        cut: of its parameters those count that this rank is responsible for.
        dtype: of the result, `norm_dtype`.
        world: squares are summed in its order.
        kernel: as in `sum_of_squares`.
    """
    shares = cut.shares
    # In the model's order: a set's differs between processes, and so would the last bit of the sum.
    mine = [(name, p.grad) for name, p in cut.parameters.items() if p.grad is not None and name in cut.primary()]
    whole = [gradient for name, gradient in mine if name not in shares]
    weighted = [(gradient, shares[name]) for name, gradient in mine if name in shares]
    squares = sum_of_squares(whole, weighted, kernel=kernel)
    world.all_reduce_replica(squares)
    return squares.sqrt().to(dtype)


def all_reduce_norm(
    counts: Sequence[int],
    shards: Sequence[Tensor],
    world: WorldGroup,
    weighted: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    kernel: bool = False,
) -> tuple[list[int], Tensor]:
    """Returns the sums of `counts` over all ranks, and the L2 norm of everybody's `shards`; all ranks of the job call.

    The norm is fp64, in host memory, and the same bits on every rank; it is infinite or no number where any gradient of
    any rank is. Squares are summed in fp64: on a rank in the order of `shards`, then in that of `WorldGroup`.

    Args:
        counts: this rank's, as many as every rank's.
        shards: gradients that no other rank brings, any shapes.
        weighted, kernel: see `sum_of_squares`.
    """
    squares = sum_of_squares(shards, weighted, kernel=kernel)
    mine = torch.cat([torch.tensor(counts, dtype=torch.float64), squares.reshape(1)])
    world.all_reduce(mine)
    return [int(count) for count in mine[:-1]], mine[-1].sqrt()


def sum_of_squares(
    tensors: Sequence[Tensor], weighted: Sequence[tuple[Tensor, Tensor]] = (), *, kernel: bool = False
) -> torch.Tensor:
    """Returns the sum of the squares of all elements, a scalar of fp64 in host memory.

    Args:
        weighted: tensors with by what the square of each element is multiplied, in fp64 and of a shape that expands to
            the tensor's: one over the number of ranks that bring it.
        kernel: fold3d's adds up each of `tensors` in fp64 throughout, in one pass; else torch's norms are squared.
    """
    total = torch.zeros((), dtype=torch.float64)
    if kernel:
        for tensor in tensors:
            result = torch.zeros(2, dtype=torch.float64, device=tensor.device)
            torch.ops.fold3d.squares(tensor.float() if tensor.dtype == torch.float16 else tensor.contiguous(), result)
            total += result[0].cpu()
    elif tensors:
        norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(list(tensors))]).cpu()
        total = norms.square().sum()
    for tensor, factors in weighted:
        total += tensor.to(torch.float64).square().mul_(factors).sum().cpu()
    return total


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """Returns by what gradients of global norm `norm` are multiplied (torch.nn.utils.clip_grad_norm_'s rule)."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale(parameters: Iterable[Parameter], factor: float) -> None:
    """Multiplies all gradients by `factor`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
