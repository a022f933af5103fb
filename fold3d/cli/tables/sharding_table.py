"""What `fold3d trace -t` prints: how a model is spread over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fold3d.cli.model_option import size

if TYPE_CHECKING:
    from torch import nn

    from fold3d.trace import Trace


def lines(
    model: nn.Module, traced: Trace, example: Mapping[str, Any] | None, tp: int, overrides: Mapping[str, str] | None
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]], list[str]]:
    """Returns header, rows and what stands below them. Raises: ConfigError or TraceError."""
    from fold3d.splitting import plan_sharding
    from fold3d.splitting.table import table

    plan = plan_sharding(model, traced, example or {}, tp, overrides, sequence_parallel=True)
    found = table(model, plan)
    rows = [(row.name, row.split, size(row.whole), size(row.rank), row.reason) for row in found]
    below = [f"on a rank: {size(sum(row.rank for row in found))} of {size(sum(row.whole for row in found))}"]
    numbers = sorted(
        {
            f"{one.module}.{one.name}: {one.whole} -> {one.part}"
            for split in plan.blocks.values()
            for one in split.attributes
        }
    )
    if numbers:
        below.append(f"numbers on a rank: {', '.join(numbers)}")
    below.append(f"sequence_parallel: {plan.sequence_reason or 'possible'}")
    below += [f"note: {note}" for note in plan.notes]
    return ("module", "split", "whole", "a rank", ""), rows, below
