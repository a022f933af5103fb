"""Choice: the settings that the planner decided on, what it expects of them, and why."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.layout import Ranges
from fold3d.plan.simulator import Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings of a run. The same on every rank that searched with the same job."""

    segments: int
    ranges: Ranges
    """Blocks [first, end) of every chunk."""
    schedule: str
    group_size: int | None
    """N, only with schedules that use it."""
    dp_sync: str
    """"early", "zero1", "serial", or "mixed" if buckets differ."""
    modes: tuple[tuple[str, ...], ...]
    """Per stage: "early", "zero1" or "serial" of each bucket, in forward order."""
    gather_order: tuple[tuple[int, ...], ...]
    """Per stage: its early buckets in the order of their gathers."""
    bucket_bytes: int
    """Least bytes of a bucket, for cut_buckets."""
    memory_bytes: int
    """Estimated need of the fullest rank: weights, gradients, optimizer state, activations."""
    prediction: Prediction
    reason: str
    """A paragraph for the log."""
    runners_up: tuple[tuple[str, float], ...]
    """What else was tried, with the milliseconds predicted for it; the best of each kind first."""

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds of a step."""
        return self.prediction.step_ms

    @property
    def limit_ms(self) -> float:
        """max(compute + bubble, communication) with these segments and this schedule."""
        return self.prediction.limit_ms


def kind_of(modes: tuple[tuple[str, ...], ...]) -> str:
    """Returns the one mode that all buckets have, "mixed" if they differ, "early" if there are none."""
    kinds = {mode for stage in modes for mode in stage}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "early"


def reason_of(name: str, prediction: Prediction, runners_up: tuple[tuple[str, float], ...], remarks: list[str]) -> str:
    """Returns the paragraph that says what was chosen, what it costs and what the alternatives would."""
    slowest = max(prediction.ranks, key=lambda rank: rank.compute_ms)
    parts = [
        f"Chosen: {name}; predicted {prediction.step_ms:.1f} ms a step, "
        f"{prediction.step_ms / max(1e-9, prediction.limit_ms):.2f} times the limit of {prediction.limit_ms:.1f} ms "
        f"(compute {slowest.compute_ms:.1f}, bubble {slowest.bubble_ms:.1f}, exposed PP.sync "
        f"{slowest.exposed_pp_ms:.1f}, exposed DP.sync {slowest.exposed_dp_ms:.1f}; hidden DP.sync "
        f"{slowest.hidden_dp_ms:.1f})."
    ]
    if runners_up:
        parts.append("Instead: " + "; ".join(f"{other} {step_ms:.1f} ms" for other, step_ms in runners_up) + ".")
    return " ".join(parts + remarks)
