"""The timeline of one step as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fold3d.errors import ConfigError
from fold3d.runtime.timeline import (
    CATEGORY,
    LANES,
    Event,
    Records,
    events_of,
    last_ns,
    summary,
    write_atomically,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MS = 1e6  # nanoseconds


def write_picture(
    path: str | Path, records: Records, *, pp: int, title: str = "", predicted_ms: float | None = None
) -> None:
    """Draws the step as a PNG: per rank a row of forwards and backwards, communication in thin rows below.

    Its title is `title` and the breakdown of the step, with what the simulator predicted. Called by one rank;
    ConfigError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a timeline needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    events = events_of(records)
    ranks = sorted({event.rank for event in events})
    # A figure with its own canvas: pyplot would keep it alive and could pick a display.
    figure = Figure(figsize=(14, min(40.0, 1.6 + 1.15 * len(ranks))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ticks = []
    for row, rank in enumerate(ranks):
        mine = [event for event in events if event.rank == rank]
        for lane, (low, height) in _rows(row).items():
            _bars(axes, [event for event in mine if event.lane == lane], low, height, pp)
        _numbers(axes, mine, _rows(row)["compute"], last_ns(events))
        ticks += [
            (low + height / 2, _tick(rank, lane, pp)) for lane, (low, height) in _rows(row).items() if lane != "wait"
        ]
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    for label in axes.get_yticklabels():
        label.set_fontsize(9 if label.get_text().startswith("rank") else 5)
    axes.set_ylim(len(ranks), -0.05)
    axes.set_xlim(0, max(last_ns(events), 1) / MS)
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("\n".join(line for line in (title, summary(records, predicted_ms)) if line), fontsize=10, loc="left")
    _legend(axes, events, pp)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


def _rows(row: int) -> dict[str, tuple[float, float]]:
    """Returns top and height of each lane of the row-th rank, which owns [row, row + 1)."""
    thin = ("send_f", "recv_f", "send_b", "recv_b", "reduce", "gather")
    places = {lane: (row + 0.53 + 0.064 * i, 0.052) for i, lane in enumerate(thin)}
    # Waiting happens on the compute thread, so it fills the gaps of that row.
    return {"wait": (row + 0.05, 0.45), "compute": (row + 0.05, 0.45), **places}


def _colour(event: Event, pp: int) -> tuple[float, float, float]:
    """Returns a hue per segment, light forward and full backward; communication has fixed colours."""
    from matplotlib import colormaps, colors

    fixed = {
        "wait": "#e4e4e4",
        "send_f": "#5b9bd5",
        "recv_f": "#5b9bd5",
        "send_b": "#e07b39",
        "recv_b": "#e07b39",
    }
    if event.lane != "compute":
        return colors.to_rgb(fixed.get(event.lane, "#7a4fa3"))
    hue = colors.to_rgb(colormaps["tab10"]((event.chunk // pp) % 10))
    white = {"F": 0.55, "I": 0.15, "W": 0.3}.get(event.kind, 0.0)
    red, green, blue = (part + (1 - part) * white for part in hue)
    return red, green, blue


def _bars(axes: Axes, events: Sequence[Event], low: float, height: float, pp: int) -> None:
    if events:
        spans = [(event.start / MS, (event.end - event.start) / MS) for event in events]
        colours = [_colour(event, pp) for event in events]
        # A transfer may be shorter than a pixel; an edge in its own colour keeps it visible.
        edges = "white" if events[0].lane == "compute" else "none" if events[0].lane == "wait" else colours
        axes.broken_barh(spans, (low, height), facecolors=colours, edgecolors=edges, linewidth=0.4)


def _numbers(axes: Axes, events: Sequence[Event], place: tuple[float, float], last: int) -> None:
    """Writes the micro-batch into each box that is wide enough to read it."""
    for event in events:
        if event.lane == "compute" and event.end - event.start > 0.008 * last:
            middle = (event.start + event.end) / 2 / MS
            y, colour = place[0] + place[1] / 2, "black" if event.kind == "F" else "white"
            axes.text(middle, y, str(event.micro_batch), ha="center", va="center", fontsize=7, color=colour)


def _tick(rank: int, lane: str, pp: int) -> str:
    return f"rank {rank}\ndp {rank // pp} stage {rank % pp}" if lane == "compute" else lane


def _legend(axes: Axes, events: Sequence[Event], pp: int) -> None:
    from matplotlib.patches import Patch

    names = {
        "wait": "waiting",
        "send_f": "PP activations",
        "recv_f": "PP activations",
        "reduce": "DP.sync: sums",
        "gather": "DP.sync: gathers",
    }
    names |= {"send_b": "PP gradients", "recv_b": "PP gradients"}
    found: dict[str, tuple[float, float, float]] = {}
    for event in sorted(events, key=lambda event: (LANES.index(event.lane), event.chunk // pp, event.kind != "F")):
        computed = f"{CATEGORY.get(event.kind, event.kind)}, segment {event.chunk // pp}"
        found.setdefault(names.get(event.lane, computed), _colour(event, pp))
    patches = [Patch(color=colour, label=name) for name, colour in found.items()]
    if patches:
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False)
