"""Draws docs/img/rooms.png, the picture of docs/architecture.md: `.venv/bin/python docs/pictures.py`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

CPP = (
    ("core", "schedules as data\nthe dependency rule\nvalidator, partition"),
    ("comm", "Communicator\nTransport\nloopback"),
    ("runtime", "Executor\nc10d transport\ndevice"),
    ("bindings", "fold3d._C"),
)
PYTHON = (
    ("config, topology", "settings\ncoordinates"),
    ("schedule", "generate, check\ndraw"),
    ("trace", "record and cut\nthe model"),
    ("plan", "chunks\nprograms"),
    ("runtime", "Engine\naccount"),
    ("checkpoint", "HF folders"),
    ("trainer", "Trainer\nArguments"),
    ("cli", "fold3d draw ..."),
)
FLOW = {"trace": "1 trace", "plan": "2 plan", "schedule": "3 schedule", "runtime": "4 execute"}
NO_PROCESS_GROUP = ("config, topology", "schedule", "trace", "plan")


def main() -> None:
    figure = Figure(figsize=(13, 4.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(0, 8)
    axes.set_ylim(-0.35, 4.15)
    axes.axis("off")

    def row(rooms: tuple[tuple[str, str], ...], y: float, pitch: float, colour: str, prefix: str) -> list[float]:
        centres = []
        for i, (name, holds) in enumerate(rooms):
            x, width = i * pitch + 0.06, pitch - 0.22
            edge = "#2f6b3a" if prefix == "fold3d/" and name in NO_PROCESS_GROUP else "#444444"
            axes.add_patch(
                FancyBboxPatch((x, y), width, 1.2, boxstyle="round,pad=0.02", facecolor=colour, edgecolor=edge)
            )
            title = name if "," in name else prefix + name
            axes.text(x + width / 2, y + 1.0, title, ha="center", va="center", fontsize=9, weight="bold")
            axes.text(x + width / 2, y + 0.45, holds, ha="center", va="center", fontsize=8.5)
            if i:
                axes.annotate(
                    "", (x - 0.2, y + 0.6), (x - 0.02, y + 0.6), arrowprops={"arrowstyle": "->", "color": "#444444"}
                )
            if prefix == "fold3d/" and name in FLOW:
                axes.text(
                    x + width / 2, y + 1.42, FLOW[name], ha="center", fontsize=10, color="#a03020", style="italic"
                )
            centres.append(x + width / 2)
        return centres

    python = row(PYTHON, 0.35, 1.0, "#eef4fb", "fold3d/")
    cpp = row(CPP, 2.75, 1.25, "#fdf3e4", "csrc/")
    for index in (1, 2, 3, 4):  # schedule, trace, plan and runtime import the extension
        axes.annotate(
            "",
            (cpp[3], 2.72),
            (python[index], 2.02),
            arrowprops={"arrowstyle": "->", "color": "#999999", "connectionstyle": "arc3,rad=0"},
        )
    axes.text(0.06, 4.08, "C++: each room includes the rooms its arrow leads to, and those before them", fontsize=9)
    axes.text(
        0.06,
        0.05,
        "Python: each room imports rooms before it. Green: needs no process group. Grey arrows: imports fold3d._C.",
        fontsize=9,
    )
    target = Path(__file__).parent / "img" / "rooms.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target)
    print(target)


if __name__ == "__main__":
    main()
