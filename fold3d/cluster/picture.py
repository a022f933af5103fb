"""A picture of simulations: when jobs are done, how much of the GPUs is used, how fair it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fold3d.cluster.simulate import Report
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR = 3600.0
_POINTS = 400
"""Of the curve of used GPUs: rounds are put together to so many at most."""


def draw(reports: Mapping[str, Report], gpus: Mapping[str, int], path: Path) -> None:
    """Draws a curve for each report to a file, PNG, SVG or PDF by its suffix.

    Args:
        reports: by their names in the legend.
        gpus: GPUs of the simulated cluster, of all kinds together, by the same names.

    Raises: ConfigError if matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib, which is not installed: pip install 'fold3d[draw]'") from None
    figure = Figure(figsize=(13, 3.8), dpi=110, layout="constrained")
    done, used, fair = figure.subplots(1, 3)
    for label, report in reports.items():
        _steps(done, [job.seconds / _HOUR for job in report.jobs], label)
        _steps(fair, [job.fairness for job in report.jobs], label)
        step = -(-len(report.history) // _POINTS)
        parts = [report.history[first : first + step] for first in range(0, len(report.history), step)]
        means = [sum(sum(busy.values()) for _, busy, _ in part) / len(part) for part in parts]
        used.plot([part[0][0] / _HOUR for part in parts], [100.0 * one / gpus[label] for one in means], lw=1.2)
    done.set(xlabel="hours from arrival to end", ylabel="jobs that were faster, %", ylim=(0, 101))
    done.legend(fontsize=8, loc="lower right")
    used.set(xlabel="hours", ylabel="GPUs in use, %", ylim=(0, 101))
    fair.axvline(1.0, color="#888888", lw=0.8, ls="--")
    fair.set(xlabel="time over that with an equal part (1: fair)", ylabel="jobs below, %", ylim=(0, 101))
    try:
        figure.savefig(path, format=path.suffix[1:])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def _steps(axes: Axes, values: Sequence[float], label: str) -> None:
    shares = [100.0 * (number + 1) / len(values) for number in range(len(values))]
    axes.step([0.0, *sorted(values)], [0.0, *shares], where="post", label=label, lw=1.2)
