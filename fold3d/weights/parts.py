"""Parts: what a rank of a tensor-parallel group holds of the parameters that are spread over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fold3d.errors import ConfigError
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
from fold3d.weights.part_marks import mark_part, part_of
from fold3d.weights.release import parameter_holders


@dataclass(frozen=True, slots=True)
class Parts:
    """Which part of each parameter is this rank's.

    A parameter that is spread is known by its part and its `Shard`: both together tell the whole shape.
    """

    plan: ShardingPlan
    rank: int
    """Place in the tensor-parallel group."""

    @classmethod
    def whole(cls) -> Parts:
        """Returns that of a group of one rank, which holds everything."""
        return cls(ShardingPlan(tp=1), 0)

    def shard_of(self, name: str) -> Shard | None:
        """Returns how parameter `name` is spread; None: every rank holds all of it."""
        shard = self.plan.shard_of(name)
        return None if shard is None or shard.is_replicated else shard

    def spread(self, names: Iterable[str]) -> dict[str, Shard]:
        """Returns those of `names` of which ranks hold different parts, with how they are spread."""
        return {name: shard for name in names if (shard := self.shard_of(name)) is not None}

    def shape(self, name: str, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of this rank's part of parameter `name`, whose whole shape is `whole`."""
        shard = self.shard_of(name)
        return tuple(whole) if shard is None else shard.shape(whole, self.rank)

    def whole_shape(self, name: str, part: Sequence[int]) -> tuple[int, ...]:
        """Returns the whole shape of parameter `name`, of which this rank's part has shape `part`."""
        shard = self.shard_of(name)
        return tuple(part) if shard is None else shard.whole_shape(part)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of the whole shape of parameter `name`; itself where all is held."""
        shard = self.shard_of(name)
        return whole if shard is None else shard.take(whole, self.rank)


def shard_parameters(model: nn.Module, parts: Parts) -> None:
    """Leaves of each parameter that is spread and has values this rank's part, one parameter at a time.

    The parameters stay the same objects, tied ones tied, with contiguous memory of their own; that of the whole is free
    once nobody else holds it. A gradient is cut like its parameter. Buffers, parameters on the meta device and those
    that are this very part already stay.

    Raises: ValueError for a parameter of another shape than the plan's; ConfigError for a model that was cut otherwise.
    """
    for parameter, names in parameter_holders(model):
        shard = parts.shard_of(names[0])
        if parameter.is_meta or _is_cut(names[0], parameter, shard, parts.rank) or shard is None:
            continue
        check_shape(names[0], shard, parameter.shape)
        mark_part(parameter, names[0], shard, parts.rank, parameter.shape)
        gradient, parameter.grad = parameter.grad, None
        parameter.data = shard.take(parameter.data, parts.rank)
        if gradient is not None:
            parameter.grad = shard.take(gradient, parts.rank)


def _is_cut(name: str, parameter: nn.Parameter, shard: Shard | None, rank: int) -> bool:
    """Whether it is the part already. Raises ConfigError when it is another one."""
    part = part_of(parameter)
    if part is None or part == (shard, rank):
        return part is not None
    raise ConfigError(
        f"the model was cut by another Engine, which left a part of {name} here, of shape {tuple(parameter.shape)}, "
        "and this one needs another part or the whole; use the same tp, or build the model anew and load the first "
        "engine's state_dict()"
    )


def check_shape(name: str, shard: Shard, shape: Sequence[int]) -> None:
    """Raises ValueError when a parameter of shape `shape` cannot be spread as `shard` says."""
    if shard.dim >= len(shape) or shape[shard.dim] != shard.size:
        raise ValueError(
            f"the sharding plan spreads dimension {shard.dim} of '{name}' as one of {shard.size}, but the parameter "
            f"has shape {tuple(shape)}"
        )
