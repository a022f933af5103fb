"""Pictures of a schedule on its time axis: as text for a terminal, as PNG, SVG or PDF with matplotlib."""

from __future__ import annotations

import textwrap
from os import PathLike
from typing import TYPE_CHECKING

from fold3d._C import Kind, Schedule, Span, Timeline, peak_stash, unit_timeline
from fold3d.errors import ConfigError
from fold3d.topology import segment_of, stage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD_COST = 1
BACKWARD_COST = 2
"""Drawn lengths: a backward takes about twice its forward. I and W take half a backward each."""
_LETTERS = 11
"""Of a title, per inch of the picture."""


def timeline(schedule: Schedule) -> Timeline:
    """Returns when each action of a valid schedule runs if forwards take 1, backwards 2 and transfers no time."""
    return unit_timeline(schedule, forward=FORWARD_COST, backward=BACKWARD_COST)


def summary(schedule: Schedule) -> str:
    """Returns length, bubble and stash of a schedule in one line."""
    drawn = timeline(schedule)
    stash = peak_stash(schedule)
    return (
        f"pp={schedule.pp} segments={schedule.segments} m={schedule.micro_batches}: {drawn.makespan:g} units "
        f"(F=1, B=2), bubble {100 * drawn.bubble:.1f} % of the compute time, "
        f"at most {max(stash)} stashed activations on a stage ({', '.join(map(str, stash))})"
    )


def text(schedule: Schedule, width: int = 120) -> str:
    """Returns the schedule as text: one line per stage, one column per unit of time, folded at `width` characters.

    An action stands where it starts and `=` where it goes on; `.` is idle time.
    """
    drawn = timeline(schedule)
    rows = [_columns(spans, round(drawn.makespan)) for spans in drawn.ranks]
    cell = 1 + max(len(column) for row in rows for column in row)
    label = len(f"stage {schedule.pp - 1} ")
    length = round(drawn.makespan)
    blocks = -(-length // max(1, (width - label) // cell))
    per_line = -(-length // blocks)  # blocks of equal width, not a last one of a single column
    lines: list[str] = []
    for begin in range(0, length, per_line):
        if lines:
            lines.append("")
        times = range(begin, min(begin + per_line, length))
        lines.append("time".ljust(label) + "".join(f"{t:<{cell}}" if t % 5 == 0 else " " * cell for t in times))
        for rank, row in enumerate(rows):
            cells = "".join(f"{row[t]:<{cell}}" if row[t] != "=" else "=" * (cell - 1) + " " for t in times)
            lines.append(f"stage {rank}".ljust(label) + cells)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _columns(spans: list[Span], length: int) -> list[str]:
    columns = ["."] * length
    for span in spans:
        start, end = round(span.start), round(span.end)
        columns[start:end] = [span.action.text] + ["="] * (end - start - 1)
    return columns


def blank(size: tuple[float, float], what: str) -> Figure:
    """Returns a figure of so many inches. Raises: ConfigError if matplotlib is not installed.

    Args:
        what: is drawn, for the error.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"drawing {what} needs matplotlib, which is not installed: pip install matplotlib") from None
    return Figure(figsize=size, dpi=110, layout="constrained")  # not pyplot's, which it keeps, and could pick a display


def picture(schedule: Schedule, path: str | PathLike[str], *, title: str = "") -> None:
    """Draws the schedule to a file, PNG, SVG or PDF by its suffix: a row per stage, a hue per segment, light forwards
    and dark backwards.

    Boxes carry their micro-batch. Of a lowered schedule the transfers are drawn as lines from sender to receiver and
    REDUCE_GRAD (DP.sync may start) as a diamond.

    Raises: ConfigError if matplotlib is not installed or the file cannot be written.
    """
    drawn = timeline(schedule)
    size = (min(24.0, max(7.0, 3.0 + 0.2 * drawn.makespan)), 1.5 + 0.42 * schedule.pp)
    figure = blank(size, "a picture")
    axes = figure.add_subplot()
    for rank, spans in enumerate(drawn.ranks):
        _boxes(axes, rank, spans, schedule.pp, drawn.makespan)
    if schedule.has_comm:
        _transfers(axes, schedule, drawn)
    _reductions(axes, schedule, drawn)
    axes.set_xlim(0, drawn.makespan)
    axes.set_ylim(schedule.pp - 0.5, -0.5)
    axes.set_yticks(range(schedule.pp), [f"stage {stage}" for stage in range(schedule.pp)])
    axes.set_xlabel("time (one chunk's forward = 1)")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    lines = [line for said in (title, summary(schedule)) for line in textwrap.wrap(said, int(_LETTERS * size[0]))]
    axes.set_title("\n".join(lines), fontsize=9, loc="left")
    _legend(axes, schedule)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from None


def _colour(kind: Kind, segment: int) -> tuple[float, float, float]:
    from matplotlib import colormaps, colors

    hue = colors.to_rgb(colormaps["tab10"](segment % 10))
    white = {Kind.FORWARD: 0.55, Kind.RECOMPUTE: 0.75, Kind.BACKWARD_INPUT: 0.15, Kind.BACKWARD_WEIGHT: 0.3}.get(
        kind, 0.0
    )
    red, green, blue = (part + (1 - part) * white for part in hue)
    return red, green, blue


def _boxes(axes: Axes, rank: int, spans: list[Span], pp: int, makespan: float) -> None:
    axes.broken_barh(
        [(span.start, span.end - span.start) for span in spans],
        (rank - 0.4, 0.8),
        facecolors=[_colour(span.action.kind, segment_of(span.action.chunk, pp)) for span in spans],
        edgecolors="white",
        linewidth=0.5,
    )
    if makespan > 200:
        return  # boxes too narrow for a number
    for span in spans:
        colour = "black" if span.action.kind in (Kind.FORWARD, Kind.RECOMPUTE) else "white"
        middle = (span.start + span.end) / 2
        axes.text(middle, rank, str(span.action.micro_batch), ha="center", va="center", fontsize=7, color=colour)


def _transfers(axes: Axes, schedule: Schedule, drawn: Timeline) -> None:
    """Lines from the end of each producer on its rank to the start of what uses its result on the next."""
    spans = {span.action.text: span for rank in drawn.ranks for span in rank}
    last = schedule.pp * schedule.segments - 1
    for span in spans.values():
        action = span.action
        step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}.get(action.kind, 0)
        if step == 0 or schedule.pp == 1 or not 0 <= action.chunk + step <= last:
            continue
        texts = [f"{action.chunk + step}{kind}{action.micro_batch}" for kind in ("F" if step > 0 else "BI")]
        target = next(spans[text] for text in texts if text in spans)
        source_row, target_row = (
            stage_of(chunk, schedule.pp, schedule.style) for chunk in (action.chunk, target.action.chunk)
        )
        edge = 0.4 if target_row > source_row else -0.4  # from the near edge of one box to the near edge of the other
        rows = [source_row + edge, target_row - edge]
        axes.plot([span.end, target.start], rows, color="#333333", linewidth=0.5, alpha=0.55, zorder=3)


def _reductions(axes: Axes, schedule: Schedule, drawn: Timeline) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind == Kind.REDUCE:
                end = max(span.end for span in drawn.ranks[rank] if span.action.chunk == action.chunk)
                axes.plot([end], [rank - 0.4], marker="D", markersize=4, color="#7a4fa3", clip_on=False, zorder=4)


def _legend(axes: Axes, schedule: Schedule) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {action.kind: None for rank in schedule.ranks for action in rank}
    names = {
        Kind.FORWARD: "forward",
        Kind.RECOMPUTE: "forward again",
        Kind.BACKWARD: "backward",
        Kind.BACKWARD_INPUT: "input gradient",
        Kind.BACKWARD_WEIGHT: "weight gradient",
    }
    handles: list[Patch | Line2D] = [
        Patch(color=_colour(kind, segment), label=f"{name}, segment {segment}")
        for segment in range(schedule.segments)
        for kind, name in names.items()
        if kind in kinds
    ]
    if schedule.has_comm:
        handles.append(Line2D([], [], color="#333333", linewidth=0.5, label="transfer"))
    if Kind.REDUCE in kinds:
        handles.append(
            Line2D([], [], color="#7a4fa3", marker="D", markersize=4, linewidth=0, label="DP.sync may start")
        )
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=7, frameon=False)
