"""The state of a whole model, gathered from its stages and taken apart again, by original parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fold3d.comms.tree_group import TreeGroup
from fold3d.errors import CheckpointError
from fold3d.stage.rank_model import RankModel

Tensors = dict[str, torch.Tensor]


def gather_model(cut: RankModel, pipeline: Any, data: TreeGroup) -> Tensors:
    """Returns every parameter, and every persistent buffer of replica 0's, on the CPU; all ranks of the job call."""
    mine = {name: cut.parameters[name].detach().cpu() for name in cut.primary()}
    buffers = {name: tensor.detach().cpu() for name, tensor in own_buffers(cut).items()}
    if buffers:
        mine.update(data.share(buffers))
    merged: Tensors = _merge(mine, pipeline)
    order = [name for name in cut.model.state_dict() if name in merged]
    return {name: merged[name].clone() for name in order}


def gather_optimizer(cut: RankModel, optimizer: Optimizer | None, pipeline: Any) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state of every parameter by name, on the CPU, on every rank of the replica."""
    mine: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        primary = cut.primary()
        for name, parameter in cut.parameters.items():
            if name in primary and parameter in optimizer.state:
                mine[name] = {key: _to_cpu(value) for key, value in optimizer.state[parameter].items()}
    merged: dict[str, dict[str, Any]] = _merge(mine, pipeline)
    return merged


def own_buffers(cut: RankModel) -> Tensors:
    """Returns the persistent buffers this stage is responsible for: those of its layers, the rest on stage 0."""
    stage_of = cut.placement.stage_of_module
    stage = cut.stage
    names = set(cut.model.state_dict()) - {n for n, _ in cut.model.named_parameters(remove_duplicate=False)}
    return {name: buffer for name, buffer in cut.model.named_buffers() if name in names and stage_of(name) == stage}


def load(cut: RankModel, optimizer: Optimizer | None, full: Mapping[str, Any]) -> None:
    """Copies this rank's share of `full` into the model and the optimizer.

    Raises: CheckpointError, before anything has changed, when a tensor is missing or has another shape.
    """
    weights: Mapping[str, torch.Tensor] = full["model"]
    targets = {**{n: p.data for n, p in cut.parameters.items()}, **own_buffers(cut)}
    for name, target in targets.items():
        found = weights.get(name)
        if found is None or found.shape != target.shape:
            raise CheckpointError(
                f"the state has {'no' if found is None else f'shape {list(found.shape)} for'} {name!r}, the model has "
                f"shape {list(target.shape)}; it belongs to another model"
            )
    for name, target in targets.items():
        target.copy_(weights[name])
    if optimizer is None:
        return
    saved: Mapping[str, Mapping[str, Any]] = full["optimizer"]
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in cut.parameters.items():
        optimizer.state.pop(parameter, None)  # what came after the state was saved does not count
        group = groups.get(id(parameter))
        if name in saved and group is not None:  # else the optimizer does not step it, such as one that is frozen now
            # Where torch's optimizers keep their step counter.
            on_device = bool(group.get("fused") or group.get("capturable"))
            optimizer.state[parameter] = {
                key: like_parameter(key, value, parameter, on_device=on_device and key == "step")
                for key, value in saved[name].items()
            }


def _merge(mine: dict[str, Any], pipeline: Any) -> dict[str, Any]:
    if pipeline is None:
        return mine
    shares: list[Any] = [None] * dist.get_world_size(pipeline)
    dist.all_gather_object(shares, mine, group=pipeline)
    return {name: value for share in shares for name, value in share.items()}


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def like_parameter(key: str, value: Any, parameter: torch.Tensor, *, on_device: bool = False) -> Any:
    """Returns a copy of a value of the parameter's optimizer state for use beside it.

    Args:
        key: its name in the state.
        on_device: numbers go to the parameter's device; else they stay where they are.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0 and (parameter.ndim > 0 or key == "step"):
        return value.to(parameter.device if on_device else value.device, copy=True)
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    # Laid out as the parameter is: fused optimizers go through the memory of both without a look at their strides.
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
