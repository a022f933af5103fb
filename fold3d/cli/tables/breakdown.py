"""Where the time of a simulated step goes, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fold3d.plan.simulator import Prediction


def table(who: str, prediction: Prediction) -> str:
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
