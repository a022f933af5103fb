"""The components of csrc/ and fold3d/, as the table of docs/architecture.md has them: each uses those before it."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from docs.pictures.sequence import IMG

PAGE = IMG.parent / "architecture.md"
FLOW = {"trace": "1 trace", "plan": "2 plan", "schedule": "3 schedule", "engine": "4 execute"}
_ROW = re.compile(r"^\| `((?:csrc|fold3d)/[\w./]+)`(,?)[^|]*\|[^|]*\| ([^|]*)\|$", re.MULTILINE)
_PER_ROW = 8


def components() -> dict[str, bool]:
    """Returns the components of the table in its order, and of each whether it may know process groups."""
    rows = _ROW.findall(PAGE.read_text())
    return {name + (" ..." if more else ""): "process groups" not in unknown for name, more, unknown in rows}


def _box(axes: Axes, place: int, top: float, name: str, edge: str) -> float:
    """Draws the component at its place in rows that begin at `top`; returns where its row is."""
    row, column = divmod(place, _PER_ROW)
    y = top - 0.8 * row
    colour = "#fdf3e4" if name.startswith("csrc") else "#eef4fb"
    axes.add_patch(FancyBboxPatch((column, y), 0.84, 0.34, boxstyle="round,pad=0.02", facecolor=colour, edgecolor=edge))
    _, _, short = name.partition("/")
    axes.text(column + 0.42, y + 0.17, short, ha="center", va="center", fontsize=9, weight="bold")
    if short in FLOW:
        axes.text(column + 0.42, y + 0.43, FLOW[short], ha="center", fontsize=9, color="#a03020")
    return y


def draw() -> Path:
    """Writes docs/img/components.png and returns its path."""
    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(-0.1, _PER_ROW)
    axes.axis("off")
    top = 0.0
    for folder, says in (
        ("csrc", "C++, csrc/: each component includes itself and those before it"),
        ("fold3d", "Python, fold3d/: each component imports itself and those before it, row by row"),
    ):
        axes.text(-0.02, top + 0.75, says, fontsize=10)
        for place, (name, knows) in enumerate(pair for pair in components().items() if pair[0].startswith(folder)):
            lowest = _box(axes, place, top, name, "#444444" if knows or folder == "csrc" else "#2f6b3a")
        top = lowest - 1.3
    axes.text(-0.02, top + 0.95, "Green: needs no process group. What computes imports fold3d._C.", fontsize=10)
    axes.set_ylim(top + 0.8, 1.0)
    target = IMG / "components.png"
    figure.savefig(target)
    return target
