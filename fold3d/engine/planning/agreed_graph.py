"""agreed_graph(): one choice of the modules between which a model is cut, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.nn import Module

from fold3d.comms.world_group import WorldGroup
from fold3d.trace import Trace, trace


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
