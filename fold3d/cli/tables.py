"""Tables that commands print: where a step's time goes, its memory, how weights are divided, what a plan is compared
with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fold3d.cli.model_option import size

if TYPE_CHECKING:
    from torch import nn

    from fold3d.plan.costs import Profile
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
    below.append(f"sequence_parallel: {plan.sequence_reason or 'possible'}")
    below += [f"note: {note}" for note in plan.notes]
    return found, below


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """DDP or HSDP which accumulates its micro-batches and reduces in the backward of the last; milliseconds of a step.

    What stays inside of a host is free of charge, and nothing costs more than its bytes: a bound that favours it.
    """

    name: str
    compute_ms: float
    """With the optimizer's update."""
    window_ms: float
    """The backward that its sum can hide beneath."""
    sum_ms: float
    """Of all gradients, between hosts."""

    @property
    def exposed_ms(self) -> float:
        """What of the sum is not hidden."""
        return max(0.0, self.sum_ms - self.window_ms)

    @property
    def step_ms(self) -> float:
        """Of the whole step."""
        return self.compute_ms + self.exposed_ms

    def against(self, step_ms: float) -> str:
        """Returns a sentence: how a plan of `step_ms` compares, and from which time of the sum on it is ahead."""
        even = max(0.0, step_ms - self.compute_ms + self.window_ms)
        verdict = "" if step_ms < self.step_ms else f": take {self.name} if the model fits"
        return (
            f"{self.name} takes at least {self.step_ms:.1f} ms = compute {self.compute_ms:.1f} + exposed sums "
            f"{self.exposed_ms:.1f}; this plan takes {step_ms / self.step_ms:.2f} of that{verdict}. "
            f"It is ahead where the sums take more than {even:.1f} ms (here {self.sum_ms:.1f})"
        )


def rivals_of(
    whole: Profile,
    *,
    bandwidth: float,
    processes: int,
    micro_batches: int,
    ranks_per_host: int | None,
    card: float | None = None,
) -> tuple[Rival, ...]:
    """Returns DDP and, where the hosts are known and several, HSDP.

    Args:
        whole: costs of the model with no weight shared out.
        bandwidth: bytes per second that a process sends to other hosts, while all do.
        card: those of a host, which DDP's ring passes once; None: nobody knows more than `bandwidth`.
        micro_batches: of a step, all together.
        ranks_per_host: that HSDP shards between; None: nobody knows.
    """
    gradients = sum(whole.gradient_bytes.values())
    share = micro_batches / processes
    forward, backward = 1e3 * sum(whole.forward), 1e3 * sum(whole.backward)
    names = {"DDP": 1} | ({"HSDP": ranks_per_host} if ranks_per_host and ranks_per_host > 1 else {})
    found = []
    for name, shards in names.items():
        hosts = processes / shards
        if hosts > 1:
            sent = 2 * (hosts - 1) / hosts * gradients / shards
            found.append(
                Rival(
                    name=name,
                    compute_ms=share * (forward + backward) + 1e3 * whole.update_seconds * gradients / shards,
                    window_ms=min(1.0, share) * backward,
                    sum_ms=1e3 * sent / (card if card is not None and shards == 1 else bandwidth),
                )
            )
    return tuple(found)


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
