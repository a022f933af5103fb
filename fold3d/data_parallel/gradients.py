"""Gradients: of tied parameters, their global norm, clipping; in `.grad`, except for `all_reduce_norm`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from fold3d.comms.groups import Groups
from fold3d.comms.tree_group import TreeGroup
from fold3d.comms.world_group import WorldGroup
from fold3d.stage.rank_model import RankModel
from fold3d.topology import Topology

Tied = Mapping[str, tuple[Parameter, Any]]
"""Canonical name -> (this rank's parameter, group of the ranks of its replica that hold a copy)."""


def tied_parameters(cut: RankModel, groups: Groups, topology: Topology) -> Tied:
    """Returns the trained parameters of this rank that other ranks of its replica hold, too."""
    return {
        name: (cut.parameters[name], groups.ties[places])
        for name, places in cut.placement.shared().items()
        if topology.holds(places) and cut.parameters[name].requires_grad
    }


def sum_tied(tied: Tied) -> None:
    """Sums the gradients of parameters that several ranks of a replica hold, in place, in the order of their names.

    Every rank of a group must call with the same names.
    """
    by_group: dict[int, list[tuple[str, Parameter, Any]]] = {}
    for name in sorted(tied):
        parameter, group = tied[name]
        by_group.setdefault(id(group), []).append((name, parameter, group))
    for members in by_group.values():
        group = members[0][2]
        used = torch.tensor([float(parameter.grad is not None) for _, parameter, _ in members])
        dist.all_reduce(used, group=group)
        for (_, parameter, _), flag in zip(members, used.tolist(), strict=True):
            if not flag:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


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


def global_norm(parameters: Iterable[Parameter], dtype: torch.dtype, pipeline: TreeGroup) -> torch.Tensor:
    """Returns the L2 norm of the gradients over all stages, identical on every rank of the pipeline.

    Args:
        parameters: those this rank is responsible for: each parameter of the model belongs to one stage.
        dtype: of the result, `norm_dtype`.
        pipeline: the stages; squares are summed in its order.
    """
    squares = sum_of_squares([parameter.grad for parameter in parameters if parameter.grad is not None])
    pipeline.all_reduce(squares)
    return squares.sqrt().to(dtype)


def all_reduce_norm(counts: Sequence[int], shards: Sequence[Tensor], world: WorldGroup) -> tuple[list[int], Tensor]:
    """Returns the sums of `counts` over all ranks, and the L2 norm of everybody's `shards`; all ranks of the job call.

    The norm is fp64, in host memory, and the same bits on every rank; it is infinite or no number where any gradient of
    any rank is. Squares are summed in fp64: on a rank in the order of `shards`, then in that of `WorldGroup`.

    Args:
        counts: this rank's, as many as every rank's.
        shards: gradients that no other rank brings, any shapes.
    """
    mine = torch.cat([torch.tensor(counts, dtype=torch.float64), sum_of_squares(shards).reshape(1)])
    world.all_reduce(mine)
    return [int(count) for count in mine[:-1]], mine[-1].sqrt()


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the squares of all elements, a scalar of fp64 in host memory."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.to(torch.float64).cpu() for norm in torch._foreach_norm(list(tensors))])
    return norms.square().sum()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """Returns by what gradients of global norm `norm` are multiplied (torch.nn.utils.clip_grad_norm_'s rule)."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale(parameters: Iterable[Parameter], factor: float) -> None:
    """Multiplies all gradients by `factor`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
