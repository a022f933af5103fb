"""`python -m benchmarks.cluster.results.markdown FILE...`: results written by --json as tables for a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def to_markdown(result: dict[str, Any]) -> str:
    """Returns the table of one result, of whichever kind."""
    if "grid" in result:
        return _grid(result)
    if "preemption" in result:
        return _preemption(result)
    return _comparison(result)


def _comparison(result: dict[str, Any]) -> str:
    systems = sorted(result["systems"].items(), key=lambda item: item[1]["median_s"])
    one, limit = result["scenario"], result["limits"]["limit_s"]
    title = f"{one['name']}: dp {one['dp']} x pp {one['pp']}, m {one['micro_batches']}, limit {limit:.3f} s"
    return _page(
        result,
        title,
        ("system", "step, s", "/ auto", "/ limit", "runs"),
        [
            (name, f"{each['median_s']:.3f}", _ratio(each["ratio_to_auto"]), _ratio(each["ratio_to_limit"]),
             str(each["counted"]))
            for name, each in systems
        ],
    )  # fmt: skip


def _preemption(result: dict[str, Any]) -> str:
    one = result["scenario"]
    return _page(
        result,
        f"{one['name']}: messages of {one['activation_bytes']} bytes beside DP.sync",
        ("", "message, ms", "/ idle", "DP.sync per step, ms", "/ without preemption"),
        [
            (name, _ratio(each["message_ms"], 1), _ratio(each["ratio_to_idle"]), _ratio(each["dp_sync_ms"], 0),
             _ratio(each["ratio_of_dp_sync"]))
            for name, each in result["preemption"].items()
        ],
    )  # fmt: skip


def _grid(result: dict[str, Any]) -> str:
    median, worst = result["median_error"], result["worst_error"]
    errors = f"median error {median:.1%}, worst {worst:.1%}" if result["grid"] else "no errors known"
    return _page(
        result,
        f"{len(result['grid'])} settings: {errors}",
        ("pp", "m", "system", "simulated, s", "measured, s", "error"),
        [
            (str(each["scenario"]["pp"]), str(each["scenario"]["micro_batches"]), each["system"],
             f"{each['predicted_s']:.3f}", f"{each['measured_s']:.3f}", f"{each['error']:+.1%}")
            for each in result["grid"]
        ],
    )  # fmt: skip


def _page(result: dict[str, Any], title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"{title} ({result['network']})", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    lines += [f"\nfailed: {', '.join(result['failures'])}"] if result["failures"] else []
    return "\n".join([*lines, "", f"`{result['command']}`"])


def _ratio(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Prints the pages of the files named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.results.markdown", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what --json wrote")
    print("\n\n".join(to_markdown(json.loads(path.read_text())) for path in parser.parse_args().results))


if __name__ == "__main__":
    main()
