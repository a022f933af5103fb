"""BucketOptimizer: steps the tensors of one bucket, with the settings of the moment when it was asked to."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.data_parallel.bucket import Piece


@dataclass(frozen=True, slots=True)
class Settings:
    """What `optimizer.step()` was called with: the settings of its groups, and how gradients are scaled for it."""

    groups: tuple[Mapping[str, Any], ...]
    coefficient: float
    """Clipping; 1.0 changes nothing."""

    @classmethod
    def of(cls, optimizer: Optimizer, coefficient: float) -> Settings:
        """Returns the settings as they are now; a schedule may change them before a bucket is updated."""
        kept = ({k: _copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
        return cls(tuple(kept), coefficient)


class BucketOptimizer:
    """A twin of the user's optimizer over some tensors, in the groups of the parameters that they are part of."""

    def __init__(self, optimizer: Optimizer, tensors: Sequence[tuple[Piece, Tensor]], *, sharded: bool):
        """Args:
        tensors: what to step; each stands for its piece's parameter. Those of parameters that the optimizer does not
            have are left alone.
        sharded: the twin keeps a state of its own; else the tensors are the parameters, and the state is the
            optimizer's.
        """
        self._optimizer = optimizer
        self._sharded = sharded
        number = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.tensors = [(piece, tensor) for piece, tensor in tensors if id(piece.parameter) in number]
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
        for piece, tensor in self.tensors:
            groups[number[id(piece.parameter)]]["params"].append(tensor)
        self.twin = twin_of(optimizer, groups)

    def step(self, gradients: Mapping[int, Tensor], settings: Settings) -> None:
        """Updates the tensors.

        Args:
            gradients: index of the parameter in its bucket -> gradient of the tensor; those that are missing are
                skipped, as torch's optimizers skip parameters without gradient. Scaled in place.
        """
        if settings.coefficient != 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), settings.coefficient)
        if not self._sharded:
            self.twin.state = self._optimizer.state
        for group, kept in zip(self.twin.param_groups, settings.groups, strict=True):
            group.update(kept)
        for piece, tensor in self.tensors:
            gradient = gradients.get(piece.index)
            tensor.grad = None if gradient is None else gradient.to(tensor.dtype)
        self.twin.step()
        for _, tensor in self.tensors:
            tensor.grad = None


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns an optimizer of the same class over other tensors, without a constructor's checks and conversions."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    # These in the instance are wrappers around the original's, by a learning rate schedule and by OptimizerHooks.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in ("step", "train", "eval")})
    twin.state = defaultdict(dict)
    twin.param_groups = groups
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
