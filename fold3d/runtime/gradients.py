"""Gradients of one rank: flat buffers that are summed over the replicas, tied parameters, the global norm."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter


class GradientBuffer:
    """The gradients of one chunk's parameters, laid out flat so that one reduction covers them.

    The flat buffer has the widest dtype among the parameters. A parameter that no micro-batch of any replica used
    keeps `.grad is None`, as in a single process: optimizers skip it then. Each parameter therefore has a flag behind
    the gradients, 1 where it was used, summed with them.
    """

    def __init__(self, parameters: Iterable[Parameter]):
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        dtype = functools.reduce(torch.promote_types, (p.dtype for p in self._parameters), torch.bfloat16)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._data = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=device)
        self._flags = self._data[sum(sizes) :]
        pieces = torch.split(self._data[: sum(sizes)], sizes) if sizes else ()
        self._views = [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]

    def collect(self) -> torch.Tensor:
        """Moves every `.grad` into the flat buffer and returns it, ready to be summed in place."""
        used = [parameter.grad is not None for parameter in self._parameters]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                self._attach(parameter, view)
        self._flags.copy_(torch.tensor(used, dtype=self._flags.dtype))
        return self._data

    def average(self, replicas: int) -> None:
        """After the sum: `.grad` becomes the mean over the replicas, None where no replica used the parameter."""
        used = self._flags.tolist()
        self._data.mul_(1.0 / replicas)
        for parameter, view, flag in zip(self._parameters, self._views, used, strict=True):
            if flag:
                self._attach(parameter, view)
            else:
                parameter.grad = None

    @staticmethod
    def _attach(parameter: Parameter, view: torch.Tensor) -> None:
        # A view frees the gradient autograd made; torch wants .grad in the parameter's own dtype.
        parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)


def sum_tied(tied: Mapping[str, tuple[Parameter, Any]]) -> None:
    """Sums the gradients of parameters that several stages hold, in place, in the order of their names.

    Args:
        tied: canonical name -> (this rank's parameter, group of the stages that hold a copy). Every rank of the group
            must call with the same names.
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


def global_norm(parameters: Iterable[Parameter], pipeline: Any) -> torch.Tensor:
    """Returns the L2 norm of the gradients over all stages, fp32 or wider, identical on every rank of the pipeline.

    Args:
        parameters: those this rank is responsible for: each parameter of the model belongs to one stage.
        pipeline: group of the stages, or None for one stage.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # The parameters' dtype: a stage whose parameters are all frozen has no gradients, and must not round more coarsely.
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    squares = torch.zeros((), dtype=torch.float64)
    if gradients:
        norms = torch.stack([norm.to(torch.float64).cpu() for norm in torch._foreach_norm(gradients)])
        squares = norms.square().sum()
    if pipeline is not None:
        dist.all_reduce(squares, group=pipeline)
    return squares.sqrt().to(dtype)


def clip(parameters: Iterable[Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales the gradients so that their global norm is at most `max_norm` (torch.nn.utils.clip_grad_norm_'s rule)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))
