"""What all ranks make of their recordings, each of its own micro-batch: one choice of blocks, one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.nn import Module

from fold3d.comms.world_group import WorldGroup
from fold3d.errors import ConfigError
from fold3d.stage.call_guard import other_blocks
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
