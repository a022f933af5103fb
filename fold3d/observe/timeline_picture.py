"""The timeline of one step as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fold3d.observe.step_breakdown import NS_PER_MS, TP_SYNC, waits_for_dp_sync
from fold3d.observe.timeline import (
    CATEGORY,
    LANES,
    Records,
    TimelineEvent,
    events_of,
    last_ns,
    shares,
    summary,
    write_atomically,
)
from fold3d.plan.simulator import RankBreakdown
from fold3d.schedule.draw import blank
from fold3d.topology import coordinates, segment_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = {
    "tp_sync": "TP.sync",
    "offload": "to the pool",
    "prefetch": "from the pool",
    "send_f": "sends activations",
    "recv_f": "gets activations",
    "send_b": "sends gradients",
    "recv_b": "gets gradients",
    "reduce": "DP.sync: sums",
    "gather": "DP.sync: gathers",
}
"""The rows below a rank's computing; those in which it has nothing are left out."""
_COLOURS = {
    "tp_sync": "#b8860b",
    "offload": "#4d8076",
    "prefetch": "#4d8076",
    "send_f": "#5b9bd5",
    "recv_f": "#5b9bd5",
    "send_b": "#e07b39",
    "recv_b": "#e07b39",
    "reduce": "#7a4fa3",
    "gather": "#b28fce",
}
_WAITS = {"DP.sync": "#e4141c", "TP.sync": "#7a0010", "a stage (bubble)": "#dcdcdc"}
_SEGMENTS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#17becf", "#8c564b", "#bcbd22", "#e377c2")
"""Neither grey nor red, nor dark red, which waits have."""
_COMPUTE_INCH, _LANE_INCH, _GAP_INCH = 0.5, 0.17, 0.12
_TALLEST = 60.0


def write_picture(
    path: str | Path,
    records: Records,
    *,
    pp: int,
    tp: int = 1,
    title: str = "",
    predicted_ms: float | None = None,
    simulated: Sequence[RankBreakdown] | None = None,
) -> None:
    """Draws the step to a file, PNG, SVG or PDF by its suffix: per rank a row of forwards and backwards with the waits
    between them (red: for DP.sync, dark red: for TP.sync, grey: for another stage), below it a thin row for each kind
    of communication it has.

    Its title is `title` and the breakdown of the step, with what the simulator predicted. Called by one rank;
    ConfigError without matplotlib.

    Args:
        simulated: the breakdown of a step that was simulated; None: what the records tell.
    """
    events = events_of(records)
    ranks = sorted({event.rank for event in events})
    places, bottom = _places(events, ranks)
    figure = blank((14, min(_TALLEST, 1.3 + bottom)), "a timeline")
    axes = figure.add_subplot()
    ticks = []
    for rank in ranks:
        mine = [event for event in events if event.rank == rank]
        for lane, (top, height) in places[rank].items():
            _bars(axes, [event for event in mine if event.lane == lane], top, height, pp)
            ticks.append((top + height / 2, _tick(rank, lane, pp, tp)))
        top, height = places[rank]["compute"]
        _waits(axes, [event for event in mine if event.lane == "wait"], top, height)
        _numbers(axes, mine, (top, height), last_ns(events))
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    for label in axes.get_yticklabels():
        label.set_fontsize(9 if label.get_text().startswith("rank") else 7)
    axes.set_ylim(bottom, -_GAP_INCH)
    axes.set_xlim(0, max(last_ns(events), 1) / NS_PER_MS)
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    about = summary(records, predicted_ms) if simulated is None else shares(simulated, predicted_ms)
    axes.set_title("\n".join(line for line in (title, about) if line), fontsize=10, loc="left")
    _legend(axes, events, pp)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format=Path(path).suffix[1:]))


def _places(
    events: Sequence[TimelineEvent], ranks: Sequence[int]
) -> tuple[dict[int, dict[str, tuple[float, float]]], float]:
    """Returns top and height of the rows of each rank, by lane, and where the last one ends; in inches, downwards."""
    present = {(event.rank, event.lane) for event in events}
    top = 0.0
    places: dict[int, dict[str, tuple[float, float]]] = {}
    for rank in ranks:
        places[rank] = {"compute": (top, _COMPUTE_INCH)}
        top += _COMPUTE_INCH + 0.03
        for lane in _LABELS:
            if (rank, lane) in present:
                places[rank][lane] = (top, _LANE_INCH - 0.03)
                top += _LANE_INCH
        top += _GAP_INCH
    return places, max(top, _COMPUTE_INCH)


def _colour(event: TimelineEvent, pp: int) -> tuple[float, float, float]:
    """Returns a hue per segment, light forward and full backward; communication and waits have fixed colours."""
    from matplotlib import colors

    if event.lane == "wait":
        return colors.to_rgb(_WAITS[_awaited(event)])
    if event.lane != "compute":
        return colors.to_rgb(_COLOURS[event.lane])
    hue = colors.to_rgb(_SEGMENTS[segment_of(event.chunk, pp) % len(_SEGMENTS)])
    white = {"F": 0.55, "RECOMPUTE": 0.75, "I": 0.15, "W": 0.3}.get(event.kind, 0.0)
    red, green, blue = (part + (1 - part) * white for part in hue)
    return red, green, blue


def _bars(axes: Axes, events: Sequence[TimelineEvent], top: float, height: float, pp: int) -> None:
    if events:
        spans = [(event.start / NS_PER_MS, (event.end - event.start) / NS_PER_MS) for event in events]
        colours = [_colour(event, pp) for event in events]
        # A transfer may be shorter than a pixel; an edge in its own colour keeps it visible.
        edges = "white" if events[0].lane == "compute" else colours
        axes.broken_barh(spans, (top, height), facecolors=colours, edgecolors=edges, linewidth=0.4)


def _waits(axes: Axes, events: Sequence[TimelineEvent], top: float, height: float) -> None:
    """Draws them over the row they happen in: a layer waits for its parameters in the middle of a forward."""
    for awaited, colour in reversed(_WAITS.items()):
        spans = [
            (event.start / NS_PER_MS, (event.end - event.start) / NS_PER_MS)
            for event in events
            if _awaited(event) == awaited
        ]
        axes.broken_barh(spans, (top, height), facecolors=colour, edgecolors="none", zorder=2)


def _awaited(event: TimelineEvent) -> str:
    if event.text == TP_SYNC:
        return "TP.sync"
    return "DP.sync" if waits_for_dp_sync(event.text) else "a stage (bubble)"


def _numbers(axes: Axes, events: Sequence[TimelineEvent], place: tuple[float, float], last: int) -> None:
    """Writes the micro-batch into each box that is wide enough to read it."""
    for event in events:
        if event.lane == "compute" and event.end - event.start > 0.008 * last:
            middle = (event.start + event.end) / 2 / NS_PER_MS
            y, colour = place[0] + place[1] / 2, "black" if event.kind in ("F", "RECOMPUTE") else "white"
            axes.text(middle, y, str(event.micro_batch), ha="center", va="center", fontsize=7, color=colour)


def _tick(rank: int, lane: str, pp: int, tp: int) -> str:
    at = coordinates(rank, pp, tp)
    shard = f" tp {at.tp}" if tp > 1 else ""
    return f"rank {rank}\ndp {at.dp} stage {at.pp}{shard}" if lane == "compute" else _LABELS[lane]


def _legend(axes: Axes, events: Sequence[TimelineEvent], pp: int) -> None:
    from matplotlib.patches import Patch

    found: dict[str, tuple[float, float, float]] = {}
    for event in sorted(
        events, key=lambda event: (LANES.index(event.lane), segment_of(event.chunk, pp), event.kind != "F")
    ):
        found.setdefault(_meaning(event, pp), _colour(event, pp))
    patches = [Patch(color=colour, label=name) for name, colour in found.items()]
    if patches:
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False)


def _meaning(event: TimelineEvent, pp: int) -> str:
    if event.lane == "wait":
        return f"waits for {_awaited(event)}"
    if event.lane == "compute":
        return f"{CATEGORY.get(event.kind, event.kind)}, segment {segment_of(event.chunk, pp)}"
    pipeline: Mapping[str, str] = {"f": "PP.sync: activations", "b": "PP.sync: gradients"}
    return _LABELS[event.lane] if event.lane in ("reduce", "gather", "tp_sync") else pipeline[event.lane[-1]]
