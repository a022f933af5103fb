"""HostSteps: a user's optimizer over whole parameters, stepped in host memory instead of where they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fold3d.data_parallel.bucket import Piece
from fold3d.data_parallel.optimizer.bucket_optimizer import Settings
from fold3d.data_parallel.optimizer.bucketwise_optimizer import check_groups, groups_of, parts_of

_PART_BYTES = 16 << 20
"""Parameters of so many bytes are copied together: enough for the full speed of a copy, few for the slots."""


class HostSteps:
    """The optimizer's state of these parameters is in `Optimizer.state`, as ever, and in host memory."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Parameter],
        part_bytes: int = _PART_BYTES,
        *,
        kernel: bool = False,
    ):
        """Args:
        parameters: by name; those that the optimizer has are stepped here.
        kernel: as in `BucketOptimizer`.
        Raises: ConfigError when the host lacks memory.
        """
        self._optimizer, self._groups = optimizer, groups_of(optimizer)
        self.parameters = list(held(optimizer, parameters).values())
        parts: list[list[tuple[Piece, Tensor]]] = [[]]
        size = 0
        for index, (name, parameter) in enumerate(held(optimizer, parameters).items()):
            if parts[-1] and size >= part_bytes:
                parts.append([])
                size = 0
            parts[-1].append((Piece(name, parameter, index, 0, parameter.numel(), 0), parameter))
            size += parameter.nbytes
        self._parts = parts_of(optimizer, parts, [False] * len(parts), on_host=True, kernel=kernel)
        self.own_state()

    def own_state(self) -> None:
        """Brings a state that was loaded to the host."""
        for part in self._parts:
            part.own_state()

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """See `BucketOptimizer`."""
        for part in self._parts:
            part.set_attributes(values)

    def step(self) -> list[tuple[Parameter, Tensor]]:
        """Steps the parameters with their gradients in `.grad`, which it takes away, with the settings of now.

        Returns: what it has taken.
        Raises: ConfigError when groups are not what the optimizer was attached with.
        """
        check_groups(self._optimizer, self._groups)
        settings = Settings.of(self._optimizer, 1.0)
        taken = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        gradients = {
            piece.index: piece.parameter.grad.detach()
            for part in self._parts
            for piece, _ in part.tensors
            if piece.parameter.grad is not None
        }
        for part, following in zip(self._parts, [*self._parts[1:], None], strict=True):  # all: slots take turns
            ahead = None if following is None else partial(following.prepare, gradients, settings)
            part.step(gradients, settings, ahead)
        for parameter, _ in taken:
            parameter.grad = None
        return taken


def held(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Returns those of `parameters` that the optimizer has."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) in stepped}
