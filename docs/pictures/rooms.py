"""The rooms of csrc/ and fold3d/: each uses those before it, never one after it."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from docs.pictures.sequence import IMG

CPP = (
    ("core", "schedules as data\nthe dependency rule\nlowering, simulator"),
    ("comm", "messages, rings\nTCP, arbiter"),
    ("runtime", "Executor, c10d\nskipping blocks"),
    ("bindings", "fold3d._C"),
)
PYTHON = (
    ("config, topology ...", "settings\ncoordinates"),
    ("schedule", "generate, check\ndraw"),
    ("trace", "record the model"),
    ("weights", "initial values\nfolders"),
    ("placement", "who holds which\nparameter"),
    ("plan", "costs, search\nstrategy"),
    ("faults", "who failed\nwho is late"),
    ("comms", "groups\nsmall exchanges"),
    ("profile", "time layers\nand links"),
    ("observe", "breakdown\ntimeline"),
    ("stage", "the rank's chunks\nof the model"),
    ("data_parallel", "DP.sync"),
    ("engine", "build, run\nplan again"),
    ("checkpoint", "HF folders"),
    ("trainer", "Trainer\nArguments"),
    ("cli", "fold3d draw ..."),
)
FLOW = {"trace": "1 trace", "plan": "2 plan", "schedule": "3 schedule", "engine": "4 execute"}
NO_PROCESS_GROUP = ("config, topology ...", "schedule", "trace", "weights", "placement", "plan", "stage")
_PER_ROW = 8


def _box(axes: Axes, x: float, y: float, title: str, holds: str, colour: str, edge: str) -> None:
    axes.add_patch(FancyBboxPatch((x, y), 0.8, 1.1, boxstyle="round,pad=0.02", facecolor=colour, edgecolor=edge))
    axes.text(x + 0.4, y + 0.86, title, ha="center", va="center", fontsize=8.5, weight="bold")
    axes.text(x + 0.4, y + 0.38, holds, ha="center", va="center", fontsize=8)


def draw() -> Path:
    """Writes docs/img/rooms.png and returns its path."""
    figure = Figure(figsize=(13, 5.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(-0.1, _PER_ROW)
    axes.set_ylim(-0.45, 5.2)
    axes.axis("off")
    for place, (name, holds) in enumerate(CPP):
        _box(axes, place, 3.6, f"csrc/{name}", holds, "#fdf3e4", "#444444")
    for place, (name, holds) in enumerate(PYTHON):
        row, column = divmod(place, _PER_ROW)
        edge = "#2f6b3a" if name in NO_PROCESS_GROUP else "#444444"
        _box(axes, column, 1.75 - 1.6 * row, name, holds, "#eef4fb", edge)
        if name in FLOW:
            axes.text(column + 0.4, 2.95 - 1.6 * row, FLOW[name], ha="center", fontsize=10, color="#a03020")
    axes.text(-0.02, 4.95, "C++: each room includes itself and those to its left", fontsize=9)
    axes.text(-0.02, 3.3, "Python, fold3d/: each room imports itself and those before it, row by row", fontsize=9)
    axes.text(-0.02, -0.4, "Green: needs no process group. What computes imports fold3d._C.", fontsize=9)
    target = IMG / "rooms.png"
    figure.savefig(target)
    return target
