"""Pictures of a comparison and of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cluster.grid import GridReport
from benchmarks.cluster.results.report import Report
from fold3d.observe.step_breakdown import waits_for_dp_sync

COLOURS = {"fold3d": "#1f6f8b", "torch": "#c9a227"}
STEP_COLOURS = {
    "forward": "#9cc3e4",
    "backward": "#2f6fa7",
    "waits for a stage (bubble)": "#dcdcdc",
    "waits for DP.sync": "#e4141c",
    "DP.sync under way": "#7a4fa3",
}
"""What a rank does, and below it what its network does for the sum of the gradients."""
MS = 1e6  # nanoseconds


def draw_steps(report: Report, path: Path, titles: Mapping[str, str]) -> None:
    """Writes a PNG: the last step of rank 0 of each system, the fastest first, on one axis of time.

    Args:
        titles: the systems' names in words.

    Raises: ImportError without matplotlib (the extra `draw`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    names = sorted(report.runs, key=report.median_s)
    figure, axes = pyplot.subplots(figsize=(11, 0.9 + 0.8 * len(names)), layout="constrained")
    for row, name in enumerate(names):
        records = report.runs[name][-1].timelines[0]
        origin = min(start for lane, _, start, _, _ in records if lane in ("compute", "wait"))
        bars: dict[str, list[tuple[float, float]]] = {what: [] for what in STEP_COLOURS}
        for lane, action, start, end, _ in records:
            what = _what(lane, action)
            if what is not None and end > origin:
                begin = max(start, origin)
                bars[what].append(((begin - origin) / MS, (end - begin) / MS))
        for what, spans in bars.items():  # waits are drawn over the forward that they happen in
            top, height = (row + 0.3, 0.14) if what.startswith("DP.sync") else (row - 0.3, 0.56)
            axes.broken_barh(spans, (top, height), facecolors=STEP_COLOURS[what], edgecolors="white", linewidth=0.15)
        axes.text(0, row - 0.34, titles[name], va="bottom", fontsize=10)
    axes.set_ylim(len(names) - 0.45, -0.65)
    axes.set_xlim(left=0)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    patches = [Patch(color=colour, label=what) for what, colour in STEP_COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _what(lane: str, action: str) -> str | None:
    """Returns the name of a record's colour, None for what is not drawn."""
    if lane == "wait":
        return "waits for DP.sync" if waits_for_dp_sync(action) else "waits for a stage (bubble)"
    if lane == "compute":
        return "forward" if "F" in action else "backward"
    return "DP.sync under way" if lane in ("reduce", "gather") else None


def draw_chart(report: Report, path: Path) -> None:
    """Writes a PNG: one bar per system, median step time over the limit, least and most as whiskers.

    Raises: ImportError without matplotlib (the extra `draw`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    one = report.scenario
    names = sorted(report.runs, key=report.median_s, reverse=True)
    medians = [report.ratio(name) for name in names]
    least = [min(run.step_s for run in report.counted(name)) / one.limit_s for name in names]
    most = [max(run.step_s for run in report.counted(name)) / one.limit_s for name in names]
    below = [median - low for median, low in zip(medians, least, strict=True)]
    above = [high - median for median, high in zip(medians, most, strict=True)]
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.36 * len(names)), layout="constrained")
    colours = [COLOURS[name.partition("-")[0]] for name in names]
    axes.barh(names, medians, xerr=[below, above], color=colours, error_kw={"ecolor": "#444444", "capsize": 3})
    for row, (median, high) in enumerate(zip(medians, most, strict=True)):
        axes.text(high + 0.02, row, f"{median:.2f}", va="center", fontsize=9)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xlim(0, max(1.0, *most) * 1.1)
    axes.set_xlabel(f"step time / limit ({one.limit_s:.3f} s)")
    network = f"{report.scenario.rate_mbit:g} Mbit/s links" if report.shaped else "UNSHAPED loopback"
    axes.set_title(f"Scenario {one.name}, dp {one.dp} x pp {one.pp}, m {one.micro_batches}, {network}", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_grid(report: GridReport, path: Path) -> None:
    """Writes a PNG: the simulator's step time against the measured one.

    Raises: ImportError without matplotlib (the extra `draw`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    longest = max((max(one.predicted_s, one.measured_s) for one in report.results), default=1.0) * 1.05
    for family in sorted({one.cell.system.name.partition(":")[0] for one in report.results}):
        mine = [one for one in report.results if one.cell.system.name.partition(":")[0] == family]
        axes.scatter([one.measured_s for one in mine], [one.predicted_s for one in mine], s=22, label=family)
    axes.plot([0, longest], [0, longest], color="black", linewidth=1)
    axes.fill_between([0, longest], [0, 0.95 * longest], [0, 1.05 * longest], color="black", alpha=0.08, label="5 %")
    axes.set_xlim(0, longest)
    axes.set_ylim(0, longest)
    axes.set_xlabel("measured step, s")
    axes.set_ylabel("simulated step, s")
    axes.set_title("The simulator" + ("" if report.shaped else ", UNSHAPED loopback"), fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
