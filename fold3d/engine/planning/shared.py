"""What ranks must have in common before the first step, in words, for them to compare."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields

from torch.nn import Module, Parameter

from fold3d.config import ParallelConfig
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.plan.strategy import Strategy
from fold3d.sharding.plan import ShardingPlan
from fold3d.trace import Trace
from fold3d.trace.wrappers import whole_shape
from fold3d.weights.missing import MissingWeight


def settings_of(config: ParallelConfig, strategy: Strategy) -> dict[str, str]:
    """Returns what was asked for, and what was decided."""
    asked = {field.name: repr(getattr(config, field.name)) for field in fields(config)}
    decided = (word.split("=", 1) for word in shlex.split(str(strategy)))
    return asked | {f"strategy's {name}": value for name, value in decided}


def parameters_of(model: Module) -> dict[str, str]:
    """Returns the parameters of a model, which may be cut: shapes are whole, and of those of other ranks it is known
    whether they are trained."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        trained = parameter.trainable if isinstance(parameter, MissingWeight) else parameter.requires_grad
        found[f"parameter {name}"] = f"{tuple(whole_shape(parameter))} {parameter.dtype} requires_grad={trained}"
    return found


def layout_of(layout: Trace | None, placement: ParameterPlacement, sharding: ShardingPlan | None) -> dict[str, str]:
    """Returns where the parts of a model lie."""
    found = {"blocks": ",".join(layout.blocks) if layout else "", "tp plan": sharding.digest if sharding else ""}
    found |= {f"tp split of {name}": repr(shard) for name, shard in (sharding.shards if sharding else {}).items()}
    found |= {f"chunks of {name}": repr(chunks) for name, chunks in placement.readers.items()}
    return found | {f"stage of {name}": str(stage) for name, stage in placement.modules.items()}


def buckets_of(buckets: Sequence[BucketSpec], parameters: Mapping[str, Parameter]) -> dict[str, str]:
    """Returns what a rank's gradients are summed in."""
    return {
        f"bucket {number}": f"chunk {one.chunk}, {one.summed_over}: "
        + ", ".join(f"{name} of {parameters[name].numel()}" for name in one.names)
        for number, one in enumerate(buckets)
    }
