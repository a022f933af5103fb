"""The most memory that any process has needed, for the logs."""

from __future__ import annotations

from torch import Tensor

from fold3d.engine.engine import Engine
from fold3d.observe.memory import peak_bytes


def own_peaks(engine: Engine) -> tuple[float, ...]:
    """Returns this rank's: of the process, of what training needs, and the rank."""
    return float(peak_bytes(engine.device)), float(engine.memory.peak), float(engine.topology.rank)


def highest_peaks(engine: Engine, peaks: Tensor) -> dict[str, float]:
    """Returns the log's keys; all ranks call.

    Args:
        peaks: [replicas, 3], `own_peaks` of the ranks of this stage.
    """
    fullest = peaks[peaks[:, 1].argmax()].tolist()
    highest = engine.highest_of_replica(fullest[1])
    where = fullest[2] if fullest[1] == highest else -1.0
    measured = {
        "peak_memory_gb": round(engine.highest_of_replica(peaks[:, 0].max().item()) / 1e9, 2),
        "peak_memory_mb": round(highest / 1e6, 1),
        "peak_memory_rank": engine.highest_of_replica(where),
    }
    if engine.planned_memory is not None:
        measured["predicted_peak_memory_mb"] = round(engine.planned_memory / 1e6, 1)
    return measured
