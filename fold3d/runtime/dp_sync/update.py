"""Stepping a user's optimizer bucket by bucket, later than it was asked to and with the settings of that moment."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.errors import ConfigError
from fold3d.runtime.dp_sync.bucket import Piece

_SAMPLE = (96, 100)
"""Some optimizers treat only tensors of 4,096 elements and more in blocks: each half has as many."""
_CUT = 4611
"""Where the sample is cut: not at a row, so that whatever looks at rows, columns or norms shows."""


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
        self.twin = _twin(optimizer, groups)

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


def check_separable(optimizer: Optimizer, *, parts: bool) -> None:
    """Raises ConfigError unless the optimizer steps each tensor by itself, and if `parts`, each element.

    Found out by trying, with the settings of each group: two steps on two small matrices together must give the same
    numbers as on each alone, or on the halves of each.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        if "lr" in settings:
            settings["lr"] = 0.1  # a schedule may begin at zero, where nothing shows
        try:
            together = _tried(optimizer, settings, [_samples()])
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be stepped layer by layer, as several replicas need it "
                f"({type(error).__name__}: {error}); use another optimizer"
            ) from error
        if not _same(together, _tried(optimizer, settings, [[sample] for sample in _samples()])):
            raise ConfigError(
                f"{name} gives other numbers for parameters together than for each alone, but with several replicas "
                "layers are stepped one after the other; use an optimizer that treats parameters independently"
            )
        if not parts:
            continue
        halves = [[part] for sample in _samples() for part in _cut(sample)]
        try:
            cut = _tried(optimizer, settings, halves)
        except Exception as error:
            raise ConfigError(
                f'dp_sync="zero1" steps parts of parameters, which {name} cannot do ({type(error).__name__}: {error}); '
                'set dp_sync="early"'
            ) from error
        if not _same(together, cut):
            raise ConfigError(
                f'dp_sync="zero1" steps parts of parameters, but {name} gives other numbers for a part than for the '
                'whole: it does not work element by element; set dp_sync="early"'
            )


_Sample = tuple[Tensor, ...]
"""A tensor and its gradients of two steps."""


def _samples() -> list[_Sample]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(_SAMPLE, generator=generator) for _ in range(3)) for _ in range(2)]


def _cut(sample: _Sample) -> list[_Sample]:
    flat = [tensor.flatten() for tensor in sample]
    return [tuple(tensor[:_CUT].clone() for tensor in flat), tuple(tensor[_CUT:].clone() for tensor in flat)]


def _tried(optimizer: Optimizer, settings: Mapping[str, Any], twins: Sequence[Sequence[_Sample]]) -> Tensor:
    """Returns all elements after two steps, in order, when each entry of `twins` is stepped by a twin of its own."""
    for samples in twins:
        twin = _twin(optimizer, [{**settings, "params": [sample[0] for sample in samples]}])
        for step in (1, 2):
            for sample in samples:
                sample[0].grad = sample[step].clone()
            twin.step()
    return torch.cat([sample[0].flatten() for samples in twins for sample in samples])


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=1e-7)


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns an optimizer of the same class over other tensors, without a constructor's checks and conversions."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    # `step` in the instance is a learning rate schedule's wrapper around the original's.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin.state = defaultdict(dict)
    twin.param_groups = groups
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
