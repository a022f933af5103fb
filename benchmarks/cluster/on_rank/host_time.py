"""exposed_host_ms(): for how long an accelerator had nothing to do because the host had not told it."""

from __future__ import annotations

from fold3d.observe.step_breakdown import NS_PER_MS, StepBreakdown


def exposed_host_ms(breakdown: StepBreakdown) -> float:
    """Returns how long the compute stream idled in a step for no other reason than the host: outside of all waits, and
    in waits for messages after these had arrived. The optimizer's kernels, which no record tells of, are counted, too.

    Args:
        breakdown: of a step on a device, whose records have the device's times.
    """
    arrived = {action: end for lane, action, _, end, _ in breakdown.records if lane in ("recv_f", "recv_b")}
    late = sum(
        max(0, end - max(start, arrived.get(action, end)))
        for lane, action, start, end, _ in breakdown.records
        if lane == "wait"
    )
    return breakdown.log(dp=2, pp=2)["other_ms"] + late / NS_PER_MS
