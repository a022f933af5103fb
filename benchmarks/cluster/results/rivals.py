"""`python -m benchmarks.cluster.results.rivals FILE... [--png PNG]`: results of --json side by side.

One row per family of systems, one column per file: scenario and round trip. Of a family (`torch-bfs:4`, `torch-bfs:8`)
the fastest counts; families that only some of the files have are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "fold3d-auto": "fold3d",
    "torch-bfs": "torch pipelining, breadth first",
    "torch-interleaved": "torch pipelining, interleaved 1F1B",
    "torch-1f1b": "torch pipelining, 1F1B",
    "torch-ddp": "DDP",
    "torch-fsdp2": "FSDP2",
    "torch-fsdp2-zero3": "FSDP2, weights gathered for each pass",
    "torch-hsdp": "HSDP",
}
OURS, OTHERS = "#1f6f8b", "#c9a227"


def words(system: str) -> str:
    """Returns a family of systems in words."""
    return NAMES.get(system, system)


def title(result: dict[str, Any]) -> str:
    """Returns what tells one comparison from another: scenario and round trip."""
    trip = re.search(r"round trip ([\d.]+) ms", result["network"])
    return f"{result['scenario']['name']}, RTT {trip[1] if trip else '0'} ms"


def steps(result: dict[str, Any]) -> dict[str, float]:
    """Returns seconds per step of each family of systems, its fastest member's.

    What gloo's emulated reduce-scatter sends too much is taken off, so that FSDP2 and HSDP are not wronged.
    """
    fastest: dict[str, float] = {}
    for name, each in result["systems"].items():
        family = name.partition(":")[0]
        seconds = float(result["rivals"].get(name, {}).get("without_emulation_s", each["median_s"]))
        fastest[family] = min(seconds, fastest.get(family, seconds))
    return fastest


def shared(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the families that every comparison has, the fastest of the first comparison first."""
    first, *others = map(steps, results)
    return sorted((name for name in first if all(name in other for other in others)), key=first.__getitem__)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of seconds per step, and in brackets how many times the first system's step that is."""
    names = shared(results)
    rows = [["step, s (times the first)", *map(title, results)], ["---"] * (1 + len(results))]
    found = [steps(result) for result in results]
    for name in names:
        rows.append([words(name), *(f"{each[name]:.2f} ({each[name] / each[names[0]]:.2f})" for each in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG or SVG: one panel per comparison, one bar per system, step time over the limit.

    Raises: ImportError without matplotlib (the extra `draw`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = shared(results)
    figure, panels = pyplot.subplots(
        1,
        len(results),
        figsize=(2.6 + 2.2 * len(results), 1.0 + 0.34 * len(names)),
        layout="constrained",
        squeeze=False,
    )
    found = [
        {name: seconds / float(result["limits"]["limit_s"]) for name, seconds in steps(result).items()}
        for result in results
    ]
    most = max(ratios[name] for ratios in found for name in names)
    for column, (axes, result) in enumerate(zip(panels[0], results, strict=True)):
        ratios = [found[column][name] for name in names]
        axes.barh(range(len(names)), ratios, color=[OURS if name.startswith("fold3d") else OTHERS for name in names])
        for row, ratio in enumerate(ratios):
            axes.text(ratio + 0.02 * most, row, f"{ratio:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, 1.18 * most)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), [words(name) for name in names] if column == 0 else [])
        axes.set_title(title(result), fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.supxlabel("step time / limit of computing and network", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Prints the table of the files named on the command line, and draws them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.results.rivals", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what --json wrote")
    parser.add_argument("--png", type=Path, help="draw them here (needs matplotlib); .svg writes SVG")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    print(table(results))
    if options.png is not None:
        draw(results, options.png)


if __name__ == "__main__":
    main()
