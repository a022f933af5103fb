"""What all ranks make of their recordings, each of its own micro-batch: one choice of blocks, one layout; and what they
must have in common before the first step, in words, for them to compare.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch.nn import Module, Parameter

from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.plan.strategy import Strategy
from fold3d.sharding.plan import ShardingPlan
from fold3d.stage.call_guard import other_blocks
from fold3d.trace import Trace, trace
from fold3d.trace.wrappers import whole_shape
from fold3d.weights.release import MissingWeight


def agreed_graph(model: Module, recording: Trace, world: WorldGroup, example: Mapping[str, Any] | None) -> Trace:
    """Returns the recording of this rank's micro-batch with the modules that rank 0 has chosen as the blocks; all ranks
    call, and none may fail before it does.

    The choice depends on shares of FLOPs and on bytes, and micro-batches of replicas may be of different sizes.

    Raises: TraceError when this rank's micro-batch does not run those modules one after the other.
    """
    chosen = world.share((recording.blocks, recording.borders), timeout=world.patience)
    if chosen == (recording.blocks, recording.borders):
        return recording
    blocks, closed = chosen
    found = trace(model, partition=blocks, example=example)
    return replace(found, borders=tuple(own or other for own, other in zip(found.borders, closed, strict=True)))


def agreed_layout(
    model: Module, recording: Trace | None, world: WorldGroup, *, is_cut: bool
) -> tuple[Trace | None, str]:
    """Returns what says on all ranks which parameters lie where, and why the model is to stay in one piece; all ranks
    of the job call.

    The blocks are those of rank 0's recording. What the first micro-batches of other replicas read besides counts as
    read there; what none of them reads lies where the model's order says. A model whose replicas have run other blocks
    can be trained, but not cut.

    Args:
        recording: of this rank's micro-batch; None: it cannot be recorded.
        is_cut: the model must be cut.
    Returns: see `Trace.layout`, None where rank 0 has no recording; "" where nothing is in the way of a cut.
    Raises: ConfigError on every rank when the model must be cut and cannot be.
    """
    mine = None if recording is None else recording.layout()
    first = world.share(mine, timeout=world.patience)
    if first is None:
        return None, ""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def verdict(others: list[Trace | str | None]) -> tuple[Trace, str]:
        odd = next(((rank, one) for rank, one in enumerate(others) if isinstance(one, str)), None)
        if odd is None:
            return first.with_uses_of([one for one in others if isinstance(one, Trace)], names), ""
        why = f"the first micro-batch of {world.topology.describe(odd[0])} runs other modules than rank 0's: {odd[1]}"
        if is_cut:
            raise ConfigError(f"{why}. Set pp=1 and segments=1, where nothing is cut and any micro-batch runs")
        return first, why

    return world.decide(_difference(first, mine), verdict, timeout=world.patience)


def _difference(first: Trace, mine: Trace | None) -> Trace | str | None:
    """Returns None where `mine` says the same as rank 0's layout; why, where it has other blocks."""
    if mine is None:
        return "it cannot be recorded"
    if mine.blocks != first.blocks:
        return other_blocks(first.blocks, mine.blocks)
    return None if _uses(mine) == _uses(first) else mine


def _uses(layout: Trace) -> Sequence[Any]:
    return layout.around, layout.shared, layout.direct, layout.uses, layout.converted


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
