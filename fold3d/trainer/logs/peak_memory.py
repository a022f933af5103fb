"""The most memory that processes have needed, for the logs."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fold3d.engine.engine import Engine
from fold3d.observe.announce import announce
from fold3d.observe.memory import peak_bytes

logger = logging.getLogger(__name__)

_SAID = 16
"""Ranks that are named."""


def own_peaks(engine: Engine) -> tuple[float, ...]:
    """Returns this rank's: of the process, of what training needs, and the rank."""
    return float(peak_bytes(engine.device)), float(engine.memory.peak), float(engine.topology.rank)


def highest_peaks(engine: Engine, peaks: Tensor) -> dict[str, float]:
    """Returns the log's keys; all ranks call.

    Args:
        peaks: [replicas, 3], `own_peaks` of the ranks of this stage.
    """
    fullest = peaks[peaks[:, 1].argmax()].tolist()
    highest = _highest_of_replica(engine, fullest[1])
    where = fullest[2] if fullest[1] == highest else -1.0
    measured = {
        "peak_memory_gb": round(_highest_of_replica(engine, peaks[:, 0].max().item()) / 1e9, 2),
        "peak_memory_mb": round(highest / 1e6, 1),
        "peak_memory_rank": _highest_of_replica(engine, where),
    }
    if engine.planned_memory is not None:
        measured["predicted_peak_memory_mb"] = round(engine.planned_memory / 1e6, 1)
    return measured


def say_peaks(engine: Engine) -> None:
    """Announces on rank 0 what each rank has needed so far, the fullest first; all ranks call.

    Silent on one process, whose peak is in the logs.
    """
    with engine.supervise("comparing the memory of all ranks", meets=True):
        peaks = engine.world.gather((float(engine.memory.peak), engine.topology.rank))
    if peaks is None or len(peaks) == 1:
        return
    fullest = sorted(peaks, key=lambda one: (-one[0], one[1]))
    said = [f"rank {rank} {peak / 1e6:,.1f}" for peak, rank in fullest[:_SAID]]
    if len(fullest) > _SAID:
        said.append(f"{len(fullest) - _SAID} more from {fullest[_SAID][0] / 1e6:,.1f} to {fullest[-1][0] / 1e6:,.1f}")
    announce(logger, f"peak memory of this training, MB: {', '.join(said)}")


def _highest_of_replica(engine: Engine, value: float) -> float:
    """Returns the highest `value` that a rank of this replica gives; all ranks call."""
    highest = torch.tensor(value, dtype=torch.float64)
    with engine.supervise("comparing the stages", meets=True):
        engine.world.all_reduce_replica(highest, torch.maximum)
    return float(highest)
