"""Gradients: of tied parameters, their global norm, clipping; in `.grad`, except for `all_reduce_norm`.

On an accelerator norm and clipping are kernels: no line here makes the host wait for their numbers.
"""

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
from fold3d.device import is_accelerator
from fold3d.stage.rank_model import RankModel

Tied = Mapping[str, tuple[Parameter, Any]]
"""Canonical name -> (this rank's parameter, group of the ranks of its replica that hold a copy)."""
Factor = float | Tensor
"""By what gradients are multiplied: a number, or a scalar on their accelerator, whose value the host does not know."""
_CPU = torch.device("cpu")


def tied_parameters(cut: RankModel, groups: Groups) -> Tied:
    """Returns the parameters of this rank that other ranks of its replica hold, too; also frozen ones, which may be
    trained later."""
    topology = groups.topology
    return {
        name: (cut.parameters[name], groups.ties[places])
        for name, places in cut.placement.shared(topology.tp_rank).items()
        if topology.holds(places)
    }


def sum_tied(tied: Tied) -> None:
    """Sums the gradients of parameters that several ranks of a replica hold, in place, in the order of their names.

    Every rank of a group must call with the same names; what a group sums is sent together.
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
    """Returns fp32, or the dtype of the model's widest parameter that has gradients if that is wider.

    Of the whole model, also where a stage holds a part of it: all ranks must round the norm alike.
    """
    dtypes = (one.dtype for one in model.parameters() if one.is_floating_point() or one.is_complex())
    # Those of 8 bits, which have no gradients, cannot be promoted.
    widest = functools.reduce(torch.promote_types, (one for one in dtypes if one.itemsize > 1), torch.float32)
    return widest.to_real()  # a norm of complex gradients is real


def global_norm(
    cut: RankModel, dtype: torch.dtype, device: torch.device, world: WorldGroup, *, kernel: bool = False
) -> torch.Tensor:
    """Returns the L2 norm of the gradients in `.grad` of a whole replica, identical on every rank of it.

    It is on the rank's device, and the host waits for no kernel.

    Args:
        cut: of its parameters those count that this rank is responsible for.
        dtype: of the result, `norm_dtype`.
        device: where the gradients are.
        world: squares are summed in its order.
        kernel: as in `sum_of_squares`.
    """
    shares = cut.shares
    # In the model's order: a set's differs between processes, and so would the last bit of the sum.
    mine = [(name, p.grad) for name, p in cut.parameters.items() if p.grad is not None and name in cut.primary()]
    whole = [gradient for name, gradient in mine if name not in shares]
    weighted = [(gradient, shares[name]) for name, gradient in mine if name in shares]
    squares = sum_of_squares(whole, weighted, device=device, kernel=kernel)
    world.all_reduce_replica(squares)
    return squares.sqrt().to(dtype)


def all_reduce_norm(
    counts: Sequence[int],
    shards: Sequence[Tensor],
    world: WorldGroup,
    weighted: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    device: torch.device,
    kernel: bool = False,
) -> tuple[list[int], Tensor]:
    """Returns the sums of `counts` over all ranks, and the L2 norm of everybody's `shards`; all ranks of the job call.

    The norm is fp64, on the rank's device, and the same bits on every rank; it is infinite or no number where any
    gradient of any rank is. Squares are summed in fp64: on a rank in the order of `shards`, then in that of
    `WorldGroup`. On an accelerator the counts, which the host must know, are told apart from it, and the host waits for
    the other hosts but for no kernel.

    Args:
        counts: this rank's, as many as every rank's.
        shards: gradients that no other rank brings, any shapes.
        device: where they are.
        weighted, kernel: see `sum_of_squares`.
    """
    squares = sum_of_squares(shards, weighted, device=device, kernel=kernel)
    if is_accelerator(device):
        world.all_reduce(squares)
        mine = torch.tensor(counts)
        world.all_reduce(mine)
        return mine.tolist(), squares.sqrt()
    mine = torch.cat([torch.tensor(counts, dtype=torch.float64), squares.reshape(1)])  # one exchange for both
    world.all_reduce(mine)
    return [int(count) for count in mine[:-1]], mine[-1].sqrt()


def sum_of_squares(
    tensors: Sequence[Tensor],
    weighted: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    device: torch.device = _CPU,
    kernel: bool = False,
) -> torch.Tensor:
    """Returns the sum of the squares of all elements, a scalar of fp64 on `device`, where the tensors are.

    Args:
        weighted: tensors with by what the square of each element is multiplied, in fp64 and of a shape that expands to
            the tensor's: one over the number of ranks that bring it.
        kernel: fold3d's adds up each of `tensors` in fp64 throughout, in one pass; else torch's norms are squared.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if kernel:
        result = torch.zeros(2, dtype=torch.float64, device=device)
        for tensor in tensors:  # each adds its sum to what is there
            torch.ops.fold3d.squares(tensor.float() if tensor.dtype == torch.float16 else tensor.contiguous(), result)
        total = result[0]
    elif tensors:
        dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
        norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(dense)])
        total = norms.square().sum()
    for tensor, factors in weighted:
        total = total + tensor.to(torch.float64).square().mul_(factors).sum()
    return total


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> Factor:
    """Returns by what gradients of global norm `norm` are multiplied (torch.nn.utils.clip_grad_norm_'s rule); where the
    norm is on an accelerator a number there, which the host need not know."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return coefficient if is_accelerator(norm.device) else float(coefficient)


def scale(parameters: Iterable[Parameter], factor: Factor) -> None:
    """Multiplies all gradients by `factor`."""
    multiply([parameter.grad for parameter in parameters if parameter.grad is not None], factor)


def multiply(gradients: Sequence[Tensor], factor: Factor) -> None:
    """Multiplies tensors in place, in the precision of fp32 or their own if that is higher.

    Args:
        gradients: on one device.
        factor: a number, or a scalar on their device: the host does not wait for its value.
    """
    if isinstance(factor, Tensor):
        narrow = [gradient for gradient in gradients if gradient.dtype.itemsize < 4]
        for gradient in narrow:  # to which torch would round the factor
            gradient.copy_(gradient.float().mul_(factor))
        gradients = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
    elif factor == 1.0:
        return
    if gradients:
        torch._foreach_mul_(list(gradients), factor)
