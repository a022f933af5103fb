"""How much memory tensors take that cross chunk borders: what a rank received and what it sent, while they are alive.

    python -m benchmarks.boundary_memory [--pp 4] [--micro-batches 16] [--length 128] [--hidden 64] [--json FILE]

Trains a GPT-like chain of blocks on pp processes of this machine, with schedules 1f1b and aiao (2 segments), with and
without recomputation, and counts at every forward how many bytes of such tensors the busiest rank holds. A tensor
counts once, however many hold it, from the forward that made or took it until its memory is given back. The largest
number of a step, the smallest of a few steps: a message still on its way to a slow receiver is not what is to be shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.local.ranks import run_ranks
from fold3d import Engine, ParallelConfig
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.model_chunk import PipelineChunk, Run

BLOCKS, BATCH, STEPS = 8, 2, 3
MB = 1e6


class Boundaries:
    """Tensors at the chunk borders of this process. `peak`: the most bytes since it was last set to 0."""

    def __init__(self) -> None:
        self.peak = 0
        self._alive: dict[int, tuple[str, int, StorageWeakRef]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what engines made in the body receive and send."""
        run = PipelineChunk._forward

        def forward(
            chunk: PipelineChunk, micro_batch: MicroBatch, received: list[Tensor], which: Run, *batch: Any
        ) -> tuple[list[Tensor], Any]:
            self._add("received", received)
            sent, result = run(chunk, micro_batch, received, which, *batch)
            if not chunk._is_last:
                self._add("sent", sent)
            self.peak = max(self.peak, self.bytes("received") + self.bytes("sent"))
            return sent, result

        PipelineChunk._forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            PipelineChunk._forward = run  # type: ignore[method-assign]

    def bytes(self, kind: str) -> int:
        """Returns how many bytes are alive of what was "received" or "sent"."""
        self._alive = {key: one for key, one in self._alive.items() if not one[2].expired()}
        return sum(size for what, size, _ in self._alive.values() if what == kind)

    def _add(self, kind: str, tensors: list[Tensor]) -> None:
        self.bytes(kind)  # forgets those that are gone, whose numbers may come again
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self._alive.setdefault(reference.cdata, (kind, storage.nbytes(), reference))


class Block(nn.Module):
    """Norm, and a perceptron beside the residual stream."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


class Chain(nn.Module):
    """Blocks; returns the mean square error."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden) for _ in range(BLOCKS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


CASES = [
    {"schedule": schedule, "segments": segments, "recompute": recompute}
    for schedule, segments in (("1f1b", 1), ("aiao", 2))
    for recompute in (False, True)
]


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank: measures every case."""
    dist.init_process_group("gloo")
    found = []
    for case in CASES:
        torch.manual_seed(0)
        rows = torch.randn(options.micro_batches * BATCH, options.length, options.hidden)
        batch = {"x": rows, "y": rows.roll(1, 0)}
        config = ParallelConfig(pp=options.pp, micro_batches=options.micro_batches, blocks="layers", **case)  # type: ignore[arg-type]
        boundaries, peaks = Boundaries(), []
        with boundaries.watching():
            engine = Engine(
                Chain(options.hidden),
                config,
                optimizer=torch.optim.SGD,
                example={k: v[:BATCH] for k, v in batch.items()},
            )
            for _ in range(STEPS):
                boundaries.peak = 0
                engine.step(batch)
                peaks.append(boundaries.peak)
                dist.barrier()
            engine.close()
        all_peaks: list[Any] = [None] * options.pp
        dist.all_gather_object(all_peaks, min(peaks))
        found.append({**case, "peak_bytes": max(all_peaks)})
    dist.destroy_process_group()
    return found


def main() -> None:
    """Prints a table; the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("pp", 4), ("micro-batches", 16), ("length", 128), ("hidden", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_ranks(work, options.pp, options)[0]
    one = BATCH * options.length * options.hidden * 4
    print(f"one tensor at a border: {one / MB:.2f} MB; {options.pp} stages, {options.micro_batches} micro-batches")
    print(f"{'schedule':10} {'segments':>8} {'recompute':>9} {'peak MB':>8} {'tensors':>8}")
    for case in found:
        peak = case["peak_bytes"]
        recompute = "yes" if case["recompute"] else "no"
        print(f"{case['schedule']:10} {case['segments']:8} {recompute:>9} {peak / MB:8.1f} {peak / one:8.1f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
