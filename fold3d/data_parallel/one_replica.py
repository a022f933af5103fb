"""OneReplica: gradients where there is one replica: in `.grad`, summed only over ranks that hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fold3d.comms.groups import Groups
from fold3d.config import ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.bucket import check_dropped
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.data_parallel.optimizer.host_copies import check_room
from fold3d.data_parallel.optimizer.host_steps import HostSteps, held
from fold3d.data_parallel.optimizer.separable import check_separable, check_steps, compare_settings
from fold3d.stage.rank_model import RankModel


class OneReplica(GradientSync):
    """Which leaves the gradients where autograd puts them, and the step to the optimizer."""

    def __init__(self, cut: RankModel, groups: Groups, config: ParallelConfig) -> None:
        self.steps_by_itself, self._kernels = config.offload_optimizer, config.kernels == "fold3d"
        self._cut, self._topology, self._groups = cut, groups.topology, groups
        self._tied = gradients.tied_parameters(cut, groups)
        self._norm_dtype = gradients.norm_dtype(cut.model)
        self._whole = False  # somebody may have changed the gradients
        self._host: HostSteps | None = None
        self._taken: list[tuple[Parameter, Tensor]] = []  # what `.grad` held when the optimizer was stepped
        self._optimizer: Optimizer | None = None
        self._untaken = False  # gradients are here that it has not taken

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """Raises ConfigError when there are several stages and it cannot be stepped stage by stage, or shards and it
        cannot be stepped part by part, or it shall be stepped on the host and cannot be there."""
        compare_settings(optimizer, self._groups.world)
        self._optimizer = optimizer
        if self.steps_by_itself:
            if self._kernels:
                check_steps(optimizer)
            state_bytes = check_separable(optimizer, parts=False, tp=self._topology.tp, on_host=True)
            check_room(state_bytes * sum(p.numel() for p in held(optimizer, self._cut.parameters).values()))
            self._host = HostSteps(optimizer, self._cut.parameters, kernel=self._kernels)
            return
        if self._topology.pp * self._topology.tp > 1:  # each rank steps its own parameters
            check_separable(optimizer, parts=False, tp=self._topology.tp)
        optimizer.register_step_pre_hook(self._take)

    def begin(self, micro_batches: int, chunks: Sequence[int], *, whole: bool) -> None:
        """Takes the gradients of the step before off the parameters."""
        self.abandon()
        self._whole = whole

    def check_taken(self) -> None:
        """Raises ConfigError where they are still in `.grad`."""
        if self._untaken and self._optimizer is not None:
            check_dropped(self._optimizer)

    def end(self) -> None:
        """Sums the gradients of weights that several ranks hold, and have shares of."""
        gradients.sum_tied(self._tied)
        self._untaken = True

    def norm(self) -> Tensor:
        """Returns the global gradient norm, the same on every rank; all ranks call."""
        groups = self._groups
        return gradients.global_norm(self._cut, self._norm_dtype, groups.device, groups.world, kernel=self._kernels)

    def scale(self, coefficient: gradients.Factor) -> None:
        """Scales `.grad`."""
        gradients.scale(self._cut.parameters.values(), coefficient)

    def update(self) -> None:
        """Steps the optimizer on the host; its own step then finds no gradients of these parameters."""
        if self._host is not None:
            self._take()
            self._taken = self._host.step()

    def updated(self) -> None:
        """The optimizer has stepped: `.grad` holds what it held."""
        for parameter, gradient in self._taken:
            parameter.grad = gradient
        self._taken = []

    def abandon(self) -> None:
        """Takes the gradients off the parameters."""
        self._untaken = False
        for parameter in self._cut.parameters.values():
            parameter.grad = None

    def split_state(self) -> None:
        """It stays whole, where it belongs."""
        if self._host is not None:
            self._host.own_state()

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """See GradientSync."""
        if self._host is not None:
            self._host.set_attributes(values)

    def close(self) -> None:
        """The optimizer may go on by itself."""
        self._whole = False

    def _take(self, *_: Any) -> None:
        """Before the optimizer's step: copies of tied weights get the first one's gradients, if others may have changed
        them."""
        self._untaken = False
        if not self._whole:
            return
        for name, (parameter, group) in sorted(self._tied.items()):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            used = [parameter.grad is not None]
            source = self._topology.source_of(self._cut.placement.summed_over(name, self._topology.tp_rank))
            gradients.share_first(gradient, used, source, group)
            parameter.grad = gradient if used[0] else None
