"""Tables that commands print: where a step's time goes, its memory, how weights are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fold3d.cli.model_option import size

if TYPE_CHECKING:
    from torch import nn

    from fold3d.plan.memory import StageMemory
    from fold3d.plan.simulator import Prediction
    from fold3d.splitting.overrides import Row
    from fold3d.trace import Trace


def breakdown_table(who: str, prediction: Prediction) -> str:
    """Returns a row per rank (or stage, as `who` says), in milliseconds; TP.sync only where there is some."""
    lines, has_tp = [], any(part.exposed_tp_ms > 0 for part in prediction.ranks)
    if any(part.exposed_dp_ms + part.exposed_pp_ms > 0 for part in prediction.ranks):
        lines.append("exposed: what the step would be shorter by without it; another stage's wait for it counts, too")
    copies = any(part.exposed_offload_ms > 0 for part in prediction.ranks)
    head = f"{'ms':<8}{'compute':>10}" + (f"{'exposed TP':>12}" if has_tp else "")
    title = f"{head}{'bubble':>10}{'exposed PP':>12}{'exposed DP':>12}{'hidden DP':>11}"
    lines.append(title + (f"{'exposed copies':>16}" if copies else ""))
    for number, part in enumerate(prediction.ranks):
        row = f"{f'{who} {number}':<8}{part.compute_ms:>10.2f}" + (f"{part.exposed_tp_ms:>12.2f}" if has_tp else "")
        lines.append(
            f"{row}{part.bubble_ms:>10.2f}"
            f"{part.exposed_pp_ms:>12.2f}{part.exposed_dp_ms:>12.2f}{part.hidden_dp_ms:>11.2f}"
            + (f"{part.exposed_offload_ms:>16.2f}" if copies else "")
        )
    return "\n".join(lines)


_LEVELS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def memory_table(curves: Sequence[StageMemory]) -> str:
    """Returns a line for each stage: the bytes on its device over the step, the most, and what takes it."""
    from fold3d.config import text_of_bytes
    from fold3d.plan.memory import peaks_of

    end = max(curve.points[-1].time_ns for curve in curves)
    most = max(curve.peak.device for curve in curves)
    lines = ["memory over the step, and the most of it"]
    for stage, (curve, peak) in enumerate(zip(curves, peaks_of(curves), strict=True)):
        line = sparkline([(point.time_ns, point.device) for point in curve.points], end, most)
        pool = f"; in the pool {text_of_bytes(peak.pool)}" if peak.pool else ""
        host = f"; the optimizer in host memory {text_of_bytes(peak.host)}" if peak.host else ""
        lines.append(f"stage {stage}  {line}  {text_of_bytes(peak.bytes)} ({peak.text()}){pool}{host}")
    return "\n".join(lines)


def sparkline(points: Sequence[tuple[int, int]], end: int, most: int) -> str:
    """Returns the highest value in each of _WIDTH equal parts of the time, as bars from 0 to `most`.

    Args:
        points: (time, value from then on), by time.
        end: of the time, which begins at 0.
    """
    highest = [0] * _WIDTH
    for number, (time, value) in enumerate(points):
        until = points[number + 1][0] if number + 1 < len(points) else end
        first = min(_WIDTH - 1, _WIDTH * time // max(1, end))
        last = min(_WIDTH - 1, max(first, (_WIDTH * until - 1) // max(1, end)))
        for column in range(first, last + 1):
            highest[column] = max(highest[column], value)
    return "".join(_LEVELS[min(len(_LEVELS) - 1, len(_LEVELS) * value // max(1, most))] for value in highest)


def sharding_table(
    model: nn.Module, traced: Trace, example: Mapping[str, Any] | None, tp: int, overrides: Mapping[str, str] | None
) -> tuple[list[Row], list[str]]:
    """Returns the rows and what stands below them. Raises: ConfigError or TraceError."""
    from fold3d.splitting import plan_sharding
    from fold3d.splitting.overrides import table

    plan = plan_sharding(model, traced, example or {}, tp, overrides, sequence_parallel=True)
    found = table(model, plan)
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
    if any(split.whole_sizes for split in plan.blocks.values()):
        below.append("views: the code asks for sizes of the whole, and gets a rank's")
    below.append(f"sequence_parallel: {plan.sequence_reason or 'possible'}")
    below += [f"note: {note}" for note in plan.notes]
    return found, below


def columns(rows: Sequence[tuple[str, ...]], *, numbers: bool = True) -> list[str]:
    """Returns the rows, the header first, with columns of equal width: words to the left, numbers to the right.

    Args:
        numbers: all columns but the first one are.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
