"""Memory over a simulated step, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fold3d.plan.memory.model import StageMemory

_LEVELS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def table(curves: Sequence[StageMemory]) -> str:
    """Returns a line for each stage: the bytes on its device over the step, the most, and what takes it."""
    from fold3d.config import text_of_bytes
    from fold3d.plan.memory.model import peaks_of

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
