"""The simulator against the Fold3D paper: fed with Megatron's rows of its Tables II and III, it predicts Fold3D's.

    python benchmarks/fold3d_tables.py [--write docs/evidence/fold3d_tables.md] [--json FILE]

From each Megatron row it takes forward, backward, DP.sync and PP.sync (milliseconds of the critical path); from the
Fold3D row only the number of segments. What the paper does not say is explained in the page that --write renews.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fold3d import schedule as schedules
from fold3d.plan.cluster_model import ClusterCosts, Work
from fold3d.plan.simulator import Prediction, predict

MICRO_BATCH, SEQUENCE, HALF = 4, 1024, 2  # samples, tokens (Table IV: 64 MiB at hidden size 8192), bytes per number
MEGATRON_SEGMENTS = 2  # what Megatron's bubble columns come to: see the page
BEGIN, END = "<!-- begin of results -->", "<!-- end of results -->"
EARLIER_MODEL = {4: (1.32, 1.20), 8: (1.23, 1.085), 16: (1.18, 1.03)}  # segments: zero1, early over the limit


@dataclass(frozen=True)
class Path5:
    """The columns of one system: milliseconds of the critical path, and TFLOPs per GPU."""

    forward: float
    backward: float
    bubble: float
    dp_sync: float
    pp_sync: float
    throughput: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.bubble + self.dp_sync + self.pp_sync


@dataclass(frozen=True)
class Row:
    """One model on one cluster. A rank stands for a tensor-parallel group, which fills a host."""

    name: str
    parameters: float
    layers: int
    hidden: int
    dp: int
    pp: int
    micro_batches: int
    segments: int
    megatron: Path5
    fold3d: Path5


def _blocks(layers: int, hidden: int) -> float:
    return 12.0 * layers * hidden**2


ROWS = (
    Row("II, A100, GPT-3 18B", 18e9, 40, 6144, 8, 2, 8, 4,
        Path5(610.1, 1512.4, 143.6, 2020.0, 298.0, 67.4), Path5(634.0, 1549.0, 79.4, 629.1, 193.2, 95.8)),
    Row("II, A100, GPT-3 39B", 39e9, 48, 8192, 4, 4, 16, 4,
        Path5(1152.0, 2825.9, 439.0, 1976.8, 732.5, 88.3), Path5(1239.7, 2984.3, 213.5, 541.9, 382.2, 116.1)),
    Row("II, V100, GPT-3 18B", 18e9, 40, 6144, 4, 2, 8, 4,
        Path5(1475.1, 3919.5, 318.2, 3235.6, 307.8, 32.7), Path5(1540.0, 4102.0, 181.6, 873.1, 108.9, 43.5)),
    Row("II, V100, GPT-3 39B", 39e9, 48, 8192, 2, 4, 16, 4,
        Path5(2865.3, 7836.9, 1159.7, 2505.0, 951.7, 41.2), Path5(2920.6, 7928.3, 508.5, 670.2, 413.2, 51.6)),
    Row("III, A100, BERT", _blocks(72, 7344), 72, 7344, 4, 4, 16, 4,
        Path5(1849.4, 5242.1, 809.8, 2284.8, 572.5, 77.8), Path5(1987.8, 5327.0, 413.7, 670.5, 329.8, 98.1)),
    Row("III, A100, T-NLG", _blocks(80, 4256), 80, 4256, 8, 2, 8, 4,
        Path5(1225.4, 3481.3, 318.5, 1995.3, 452.0, 72.9), Path5(1221.0, 3574.7, 162.7, 545.9, 227.9, 96.9)),
    Row("III, A100, CPM", _blocks(48, 5120), 48, 5120, 4, 4, 16, 4,
        Path5(723.4, 1986.1, 261.8, 1084.2, 280.9, 70.9), Path5(776.7, 2021.5, 147.7, 291.8, 161.4, 91.0)),
    Row("III, A100, T5", 11.3e9, 24, 1024, 16, 2, 4, 3,
        Path5(1649.1, 4555.3, 898.2, 2270.2, 768.1, 74.9), Path5(1735.2, 4686.0, 552.1, 867.6, 343.1, 93.7)),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What the simulator says to one row; milliseconds."""

    name: str
    latency: float
    megatron: float
    fold3d: float
    fold3d_compute: float  # the same with the computing times of Fold3D's own row
    zero1: float
    early: float
    limit: float


def bandwidth_of(row: Row) -> float:
    """Returns the host's bytes per second: an all-reduce of its half-precision gradients takes Megatron's DP.sync."""
    volume = 2 * (row.dp - 1) / row.dp * row.parameters / row.pp * HALF
    return volume / (row.megatron.dp_sync / 1e3)


def work_of(row: Row, schedule: schedules.Schedule) -> Work:
    return Work.even(
        schedule,
        forward=row.megatron.forward / 1e3 / row.micro_batches,
        backward=row.megatron.backward / 1e3 / row.micro_batches,
        layers=row.layers // row.pp,
        activation_bytes=MICRO_BATCH * SEQUENCE * row.hidden * HALF,
        gradient_bytes=round(row.parameters / row.pp * HALF),
    )


def cluster_of(row: Row, latency: float) -> ClusterCosts:
    # Pieces of a quarter of a millisecond, far below any message's time.
    bandwidth = bandwidth_of(row)
    return ClusterCosts(
        dp=row.dp,
        bandwidth=bandwidth,
        latency=latency,
        hop_latency=0.0,  # the row's DP.sync has it inside
        slice_bytes=round(bandwidth / 4000),
    )


def run(row: Row, name: str, segments: int, latency: float, dp_sync: str, layers_per_bucket: int = 1) -> Prediction:
    made = schedules.generate(name, pp=row.pp, segments=segments, micro_batches=row.micro_batches)
    work, cluster = work_of(row, made), cluster_of(row, latency)
    return predict(made, work, cluster, dp_sync=dp_sync, layers_per_bucket=layers_per_bucket)


def latency_of(row: Row) -> float:
    """Returns the seconds per message with which Megatron's simulated schedule exposes the row's PP.sync."""
    made = schedules.generate("interleaved", pp=row.pp, segments=MEGATRON_SEGMENTS, micro_batches=row.micro_batches)
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        exposed = predict(made, work_of(row, made), cluster_of(row, middle), dp_sync="serial").ranks[0].exposed_pp_ms
        low, high = (middle, high) if exposed < row.megatron.pp_sync else (low, middle)
    return (low + high) / 2


def slowed(row: Row) -> Row:
    """Returns the row with Fold3D's computing times, which overlapped communication makes longer."""
    return replace(row, megatron=replace(row.megatron, forward=row.fold3d.forward, backward=row.fold3d.backward))


def result_of(row: Row) -> Result:
    latency = latency_of(row)
    zero1 = run(row, "aiao", row.segments, latency, "zero1")
    return Result(
        name=row.name,
        latency=latency * 1e3,
        megatron=run(row, "interleaved", MEGATRON_SEGMENTS, latency, "serial", 0).step_ms,
        fold3d=run(row, "aiao", row.segments, latency, "unvoted", 0).step_ms,
        fold3d_compute=run(slowed(row), "aiao", row.segments, latency, "unvoted", 0).step_ms,
        zero1=zero1.step_ms,
        early=run(row, "aiao", row.segments, latency, "early").step_ms,
        limit=zero1.limit_ms,
    )


def hardest_row() -> list[tuple[int, float, float]]:
    """Returns (segments, zero1, early) of GPT-3 18B on A100 with free PP.sync: step time over its limit."""
    row = ROWS[0]
    found = []
    for segments in (4, 8, 16):
        made = schedules.generate("aiao", pp=row.pp, segments=segments, micro_batches=row.micro_batches)
        work = Work.even(
            made,
            forward=row.megatron.forward / 1e3 / row.micro_batches,
            backward=row.megatron.backward / 1e3 / row.micro_batches,
            layers=16,
            activation_bytes=0,
            gradient_bytes=round(row.parameters / row.pp * HALF),
        )
        pair = [predict(made, work, cluster_of(row, 0.0), dp_sync=way) for way in ("zero1", "early")]
        found.append((segments, pair[0].step_ms / pair[0].limit_ms, pair[1].step_ms / pair[1].limit_ms))
    return found


def _percent(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


def tables(results: list[Result], hardest: list[tuple[int, float, float]]) -> str:
    """Returns the three tables as Markdown."""
    lines = [
        "### Fold3D's critical path and speed-up, predicted from Megatron's row",
        "",
        "| row | Megatron path: simulated / table, ms | Fold3D path: simulated / table, ms | error "
        "| with Fold3D's own computing times "
        "| speed-up: simulated / table (paths) | error | by throughput | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, result in zip(ROWS, results, strict=True):
        ours, paths = row.megatron.total / result.fold3d, row.megatron.total / row.fold3d.total
        throughput = row.fold3d.throughput / row.megatron.throughput
        lines.append(
            f"| {row.name} | {result.megatron:.0f} / {row.megatron.total:.0f} "
            f"({_percent(result.megatron, row.megatron.total)}) "
            f"| {result.fold3d:.0f} / {row.fold3d.total:.0f} | {_percent(result.fold3d, row.fold3d.total)} "
            f"| {_percent(result.fold3d_compute, row.fold3d.total)} "
            f"| {ours:.2f} / {paths:.2f} | {_percent(ours, paths)} | {throughput:.2f} | {_percent(ours, throughput)} |"
        )
    lines += [
        "",
        "### The same rows with exact DP.sync, layer by layer",
        "",
        "| row | seconds per message (fitted) | limit, ms | zero1 / limit | early / limit | Fold3D's table / limit "
        "| Megatron's table / early |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, result in zip(ROWS, results, strict=True):
        lines.append(
            f"| {row.name} | {result.latency / 1e3:.3f} | {result.limit:.0f} | {result.zero1 / result.limit:.2f} "
            f"| {result.early / result.limit:.2f} | {row.fold3d.total / result.limit:.2f} "
            f"| {row.megatron.total / result.early:.2f} |"
        )
    lines += [
        "",
        "### The hardest row over its limit",
        "",
        "| segments | zero1 | early | earlier model: zero1 | early |",
        "| --- | --- | --- | --- | --- |",
    ]
    for segments, zero1, early in hardest:
        before = EARLIER_MODEL[segments]
        lines.append(
            f"| {segments} | {zero1:.3f} ({_percent(zero1, before[0])}) | {early:.3f} ({_percent(early, before[1])}) "
            f"| {before[0]} | {before[1]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="PAGE", help="renew the tables of this page, between its two comments")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    options = parser.parse_args()
    results, hardest = [result_of(row) for row in ROWS], hardest_row()
    text = tables(results, hardest)
    print(text, end="")
    if options.write:
        page = Path(options.write)
        before, rest = page.read_text().split(BEGIN)
        after = rest.split(END)[1]
        page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    if options.json:
        numbers = {"rows": [asdict(result) for result in results], "hardest": hardest}
        Path(options.json).write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
