"""What all-in-all-out keeps on the device and in the pool, by number of micro-batches, with and without offload.

    python -m benchmarks.stash_memory [--pp 1] [--micro-batches 8 16 32 64] [--hidden 64] [--json FILE] [--png FILE]

Trains a GPT-like chain of 8 blocks in 4 segments on pp processes of this machine, offload="none" and "activations", a
pool that grows. Device bytes are all that tensors hold at once in a step by the allocator's count, parameters and batch
included, less what they held before it; pool bytes are what its slots hold. Of each the fullest process.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.boundary_memory import BATCH, MB, Chain
from benchmarks.local.ranks import run_ranks
from fold3d import _C, Engine, ParallelConfig

SEGMENTS, STEPS = 4, 2


def work(options: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """One rank: measures every case; returns offload, micro-batches, bytes on the device and in the pool."""
    dist.init_process_group("gloo")
    if not _C.count_cpu_bytes(True):
        raise SystemExit("another allocator is in the place of torch's own: nothing can be counted")
    found = []
    for offload in ("none", "activations"):
        for micro_batches in options.micro_batches:
            torch.manual_seed(0)
            rows = torch.randn(micro_batches * BATCH, options.length, options.hidden)
            batch = {"x": rows, "y": rows.roll(1, 0)}
            config = ParallelConfig(
                pp=options.pp, segments=SEGMENTS, micro_batches=micro_batches, schedule="aiao", offload=offload
            )
            sgd = functools.partial(torch.optim.SGD, lr=0.1)
            example = {name: t[:BATCH] for name, t in batch.items()}
            engine = Engine(Chain(options.hidden), config, optimizer=sgd, example=example)
            device = 0
            for _ in range(STEPS):
                before = _C.live_cpu_bytes()
                _C.reset_peak_cpu_bytes()
                engine.step(batch)
                device = _C.peak_cpu_bytes() - before
            account = engine.breakdown()
            engine.close()
            found.append((offload, micro_batches, device, account.pool_peak_bytes))
    dist.barrier()
    dist.destroy_process_group()
    return found


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns, of every case, the most bytes on a device and in a pool."""
    of_ranks = run_ranks(work, options.pp, options)
    return [
        {
            "offload": cases[0][0],
            "micro_batches": cases[0][1],
            "device_bytes": max(case[2] for case in cases),
            "pool_bytes": max(case[3] for case in cases),
        }
        for cases in zip(*of_ranks, strict=True)
    ]


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draws device and pool bytes over the number of micro-batches."""
    import matplotlib  # noqa: PLC0415: only who wants a picture needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4))
    for offload, key, label, style in (
        ("none", "device_bytes", "device, nothing offloaded", "s--"),
        ("activations", "device_bytes", "device, offloaded", "o-"),
        ("activations", "pool_bytes", "pool, offloaded", "^:"),
    ):
        mine = [row for row in rows if row["offload"] == offload]
        axes.plot([row["micro_batches"] for row in mine], [row[key] / MB for row in mine], style, label=label)
    axes.set_xlabel("micro-batches")
    axes.set_ylabel("MB, fullest process")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--png", help="draw them there")
    options = parser.parse_args()
    rows = measure(options)
    print("| offload | micro-batches | device MB | pool MB |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        sizes = f"{row['device_bytes'] / MB:.2f} | {row['pool_bytes'] / MB:.2f}"
        print(f"| {row['offload']} | {row['micro_batches']} | {sizes} |")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    if options.png:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
