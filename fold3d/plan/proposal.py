"""Proposal: the strategy that the planner found, what it expects of it, and why."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.memory import StagePeak
from fold3d.plan.simulator import Prediction
from fold3d.plan.space.registry import flags_of
from fold3d.plan.strategy import MIXED, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a search returns; the same on every rank that searched with the same job."""

    strategy: Strategy
    prediction: Prediction
    peaks: tuple[StagePeak, ...]
    """By stage: the most that a rank needs, and for what."""
    limited: bool
    """Whether there is a memory_limit."""
    cut_by_flops: bool
    """Whether the same cut comes of the flags alone, without times."""
    remarks: tuple[str, ...]
    """What else the user should know, a sentence each."""
    runners_up: tuple[tuple[str, float], ...]
    """What else was tried, with the milliseconds predicted for it; the best of each kind first."""

    @property
    def memory_bytes(self) -> int:
        """What the fullest rank needs."""
        return max(peak.bytes for peak in self.peaks)

    @property
    def fullest_stage(self) -> int:
        """The stage of the rank that needs most."""
        return max(range(len(self.peaks)), key=lambda stage: self.peaks[stage].bytes)

    micro_batch_size: int | None = None
    """Samples that pass the model at once, where the planner has chosen to divide micro-batches."""
    second_best: tuple[tuple[str, float], ...] = ()
    """Of knobs whose choice can be left to real steps: name, and milliseconds predicted with the next best value."""

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds of a step."""
        return self.prediction.step_ms

    @property
    def flags(self) -> str:
        """What the Trainer's command line must say to run with these settings and without the planner."""
        words = flags_of(self.strategy)
        if self.micro_batch_size is not None:
            words += f" --micro_batch_size {self.micro_batch_size}"
        if self.strategy.dp > 1 and self.strategy.dp_sync == MIXED:
            words += " (dp_sync stays auto: it differs from bucket to bucket, as memory_limit asks)"
        elif self.limited:
            words += " and without memory_limit"
        return words if self.cut_by_flops else f"{words} (the model is then cut by FLOPs, here by measured times)"

    @property
    def brief(self) -> str:
        """Three lines for people, and the remarks: the settings, where a step's time goes, how to pin them."""
        lines = [f"the planner chose {self.strategy.name}: {self.step_ms:.1f} ms predicted for a step", *self._ending]
        return "\n".join(lines)

    @property
    def table(self) -> str:
        """The same, with what else was tried."""
        rows = [(f"{self.strategy.name} (chosen)", self.step_ms, "")]
        rows += [(other, ms, f"  {100 * (ms / self.step_ms - 1):+.1f} %") for other, ms in self.runners_up]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"the planner chose {self.strategy.name}", f"  {'settings':<{width}}  predicted step"]
        lines += [f"  {name:<{width}}  {ms:9.1f} ms{more}" for name, ms, more in rows]
        return "\n".join([*lines, *self._ending])

    @property
    def _ending(self) -> list[str]:
        slowest = max(self.prediction.ranks, key=lambda rank: rank.compute_ms + rank.exposed_tp_ms)
        parts = (
            ("compute", slowest.compute_ms),
            ("exposed TP.sync", slowest.exposed_tp_ms),
            ("bubble", slowest.bubble_ms),
            ("exposed PP.sync", slowest.exposed_pp_ms),
            ("exposed DP.sync", slowest.exposed_dp_ms),
            ("exposed offload", slowest.exposed_offload_ms),
        )
        why = " + ".join(f"{name} {ms:.1f}" for name, ms in parts if ms > 0 or name == "compute")
        hidden = f"; {slowest.hidden_dp_ms:.1f} ms of DP.sync are hidden" if slowest.hidden_dp_ms > 0 else ""
        least = f"lower bound {self.prediction.limit_ms:.1f} ms"
        where = f"  a step: {why} ms{hidden}; {least}"
        return [where, *(f"  {remark}" for remark in self.remarks), f"  pin it with {self.flags}"]
