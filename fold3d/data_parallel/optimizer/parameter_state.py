"""The optimizer's state of one parameter: what of it is spread over a tensor-parallel group as the parameter is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard
from fold3d.weights.parts import Parts


def shard_of_state(name: str, key: str, value: Any, parameter: Sequence[int], parts: Parts) -> Shard | None:
    """Returns how a value of the state of parameter `name` is spread; None: it is the same on every rank.

    Args:
        key: the value's name in the state.
        parameter: shape of the parameter where the value is from: of the whole one, or of this rank's part.
    Raises: CheckpointError for a tensor that is neither of the parameter's shape nor one number, such as the means of
        rows and columns that Adafactor keeps: these are not those of the parts side by side.
    """
    shard = parts.shard_of(name)
    if shard is None or not isinstance(value, Tensor) or value.ndim == 0:
        return None
    if tuple(value.shape) == tuple(parameter):
        return shard
    if value.numel() == 1:
        return None
    raise CheckpointError(
        f"the optimizer's state {key!r} of {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter)}: "
        f"with tp={parts.plan.tp} the parameter is divided, and a state that is not of its shape cannot be; use an "
        "optimizer that works element by element (AdamW, SGD ...), set save_only_model=True, or tp=1"
    )


def part_of_state(name: str, key: str, value: Any, whole: Sequence[int], parts: Parts) -> Any:
    """Returns this rank's part of a value that belongs to the whole parameter `name`; itself where it is not spread.

    Raises: as `shard_of_state`.
    """
    shard = shard_of_state(name, key, value, whole, parts)
    return value if shard is None else shard.take(value, parts.rank)


def cut_state(optimizer: Optimizer, parameters: Mapping[str, Parameter], parts: Parts) -> None:
    """Leaves of a state that came about while parameters were whole this rank's part; what is cut stays as it is.

    Args:
        parameters: this rank's, by canonical name.
    Raises: as `shard_of_state`.
    """
    for name in parts.spread(parameters):
        parameter = parameters[name]
        whole = parts.whole_shape(name, parameter.shape)
        state = optimizer.state.get(parameter, {})
        if any(_has_shape(value, whole) for value in state.values()) and whole != tuple(parameter.shape):
            optimizer.state[parameter] = {
                key: part_of_state(name, key, value, whole, parts) for key, value in state.items()
            }


def assembled(what: str, values: Iterable[tuple[int, Any]], shard: Shard | None) -> Any:
    """Returns a whole value from what ranks of a tensor-parallel group have of it.

    Args:
        what: it is, for messages.
        values: (place in the group, value); of a value that is not spread the first one counts, of one that is each
            index as the first rank has it that holds it.
    Raises: CheckpointError when a rank that holds a part has no value.
    """
    held = dict(sorted(values, key=lambda one: one[0]))
    if shard is None:
        return next(iter(held.values()))
    check_complete(what, held, shard)
    part = next(iter(held.values()))
    whole = torch.empty(shard.whole_shape(part.shape), dtype=part.dtype)
    for rank, value in reversed(held.items()):
        shard.put(whole, value, rank)
    return whole


def check_complete(what: str, ranks: Collection[int], shard: Shard) -> None:
    """Raises CheckpointError unless `ranks` of a tensor-parallel group have all of something that is spread."""
    missing = [rank for rank in range(shard.ranks) if rank not in ranks and shard.first_held(rank)]
    if missing:
        raise CheckpointError(
            f"{what} is spread over {shard.ranks} shards, but shard {missing[0]} has no values of it: all shards of a "
            "stage must train the same parameters"
        )


def like_parameter(
    key: str, value: Any, parameter: Tensor, *, on_device: bool = False, on_host: bool = False, copy: bool = True
) -> Any:
    """Returns a copy of a value of the parameter's optimizer state for use beside it.

    Args:
        key: its name in the state.
        on_device: numbers go to the parameter's device; else they stay where they are.
        on_host: it is used in host memory, beside a copy of the parameter.
        copy: False: `value` itself where it can be used as it is.
    """
    if not isinstance(value, Tensor):
        return value
    device = torch.device("cpu") if on_host else parameter.device
    if value.ndim == 0 and (parameter.ndim > 0 or key == "step"):
        return value.to(device if on_device else value.device, copy=copy)
    if value.shape != parameter.shape:
        return value.to(device, copy=copy)
    if not copy and value.device == device and value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    # Laid out as the parameter is: fused optimizers go through the memory of both without a look at their strides.
    return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
