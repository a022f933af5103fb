"""A sequence diagram: who calls or tells whom, one line after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

IMG = Path(__file__).resolve().parents[1] / "img"
COLOURS = {"thread": "#eef4fb", "other": "#fdf3e4"}
_ROW = 0.36


@dataclass(frozen=True, slots=True)
class Participant:
    """A column. Those on the thread that trains are blue, what runs on other threads or ranks is yellow."""

    name: str
    where: str
    on_training_thread: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """An arrow from one participant to another, or a note at one (`target` None)."""

    source: str
    target: str | None
    text: str
    waits: bool = False
    """Drawn red: who waits here, waits for another rank."""


def draw_sequence(participants: Sequence[Participant], lines: Sequence[Line], name: str) -> Path:
    """Writes docs/img/NAME and returns its path."""
    places = {participant.name: column for column, participant in enumerate(participants)}
    height = _ROW * (len(lines) + 2.2)
    figure = Figure(figsize=(2.15 * len(participants), height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(-0.5, len(participants) - 0.5)
    axes.set_ylim(-len(lines) - 0.6, 1.6)
    axes.axis("off")
    for participant in participants:
        x = places[participant.name]
        colour = COLOURS["thread" if participant.on_training_thread else "other"]
        axes.add_patch(
            FancyBboxPatch((x - 0.4, 0.15), 0.8, 1.2, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="#444444")
        )
        axes.text(x, 1.0, participant.name, ha="center", va="center", fontsize=8.5, weight="bold")
        axes.text(x, 0.5, participant.where, ha="center", va="center", fontsize=7, color="#555555")
        axes.plot((x, x), (0.1, -len(lines) - 0.4), color="#bbbbbb", linewidth=0.8, zorder=0)
    for row, line in enumerate(lines, 1):
        colour = "#a03020" if line.waits else "#333333"
        begin = places[line.source]
        label = f"{row}  {line.text}"
        if line.target is None:
            axes.plot(begin, -row + 0.05, marker="o", color=colour, markersize=4)
            side = -1 if begin == len(participants) - 1 else 1
            axes.text(
                *(begin + 0.06 * side, -row + 0.05, label),
                ha="left" if side > 0 else "right",
                va="center",
                fontsize=7.5,
                color=colour,
                backgroundcolor="white",
            )
            continue
        end = places[line.target]
        axes.annotate("", (end, -row), (begin, -row), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.1})
        axes.text(
            *((begin + end) / 2, -row + 0.12, label),
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    target = IMG / name
    figure.savefig(target)
    return target
