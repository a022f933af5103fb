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
    name: str
    """The settings in words."""
    flags: str
    """What the Trainer's command line must say to run with these settings and without the planner."""
    remarks: tuple[str, ...]
    """What else the user should know, a sentence each."""
    runners_up: tuple[tuple[str, float], ...]
    """What else was tried, with the milliseconds predicted for it; the best of each kind first."""

    @property
    def reason(self) -> str:
        """A small table for the log: the settings, where a step's time goes, what else was tried, how to pin them."""
        slowest = max(self.prediction.ranks, key=lambda rank: rank.compute_ms)
        parts = (
            ("compute", slowest.compute_ms),
            ("bubble", slowest.bubble_ms),
            ("exposed PP.sync", slowest.exposed_pp_ms),
            ("exposed DP.sync", slowest.exposed_dp_ms),
        )
        why = " + ".join(f"{name} {ms:.1f}" for name, ms in parts if ms > 0 or name == "compute")
        rows = [(f"{self.name} (chosen)", self.step_ms, "")]
        rows += [(other, ms, f"  {100 * (ms / self.step_ms - 1):+.1f} %") for other, ms in self.runners_up]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"the planner chose {self.name}", f"  {'settings':<{width}}  predicted step"]
        lines += [f"  {name:<{width}}  {ms:9.1f} ms{more}" for name, ms, more in rows]
        hidden = f"; {slowest.hidden_dp_ms:.1f} ms of DP.sync are hidden" if slowest.hidden_dp_ms > 0 else ""
        lines.append(f"  a step: {why} ms{hidden}; no way of hiding needs less than {self.limit_ms:.1f} ms")
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks), f"  pin it with {self.flags}"])

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds of a step."""
        return self.prediction.step_ms

    @property
    def limit_ms(self) -> float:
        """max(compute + bubble, communication) with these segments and this schedule."""
        return self.prediction.limit_ms


def flags_of(
    *, segments: int, schedule: str, group_size: int | None, dp_sync: str, bucket_bytes: int, dp: int, limited: bool
) -> str:
    """Returns the command line flags that pin a choice.

    Args:
        limited: whether there is a memory_limit, which has no effect where everything is pinned.
    """
    flags = {"segments": segments, "schedule": schedule, "group_size": group_size}
    if dp > 1:
        flags |= {"dp_sync": None if dp_sync == "mixed" else dp_sync, "bucket_bytes": bucket_bytes}
    words = " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)
    if dp > 1 and dp_sync == "mixed":
        return f"{words} (dp_sync stays auto: it differs from bucket to bucket, as memory_limit asks)"
    return f"{words}{' and without memory_limit' if limited else ''}"
