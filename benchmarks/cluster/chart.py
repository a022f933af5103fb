"""draw_chart(): the comparison as a picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cluster.report import Report

COLOURS = {"fold3d": "#1f6f8b", "torch": "#c9a227"}


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
    least = [min(run.step_s for run in report.runs[name]) / one.limit_s for name in names]
    most = [max(run.step_s for run in report.runs[name]) / one.limit_s for name in names]
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
