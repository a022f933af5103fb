"""ZB-H1 and PipeDream-2BW against 1F1B on real processes: what splitting the backward, and what not draining saves.

    python benchmarks/zero_bubble.py [--rows N] [--json FILE]

Two kinds of stages, a row of the table for each size:

- sleeping: forward, I and W sleep, each as long, instead of computing, so that stages do not compete for the cores of a
  machine; everything else, messages and autograd included, is real;
- computing: transformer layers, one thread to a process, two processes.

All train models with the same weights in the same processes, ROW steps of one, then of the next: without a flush a step
is only as long as it is between others. The optimizer's rate is 0, so that losses can be compared, although 2BW's
gradients come a step late. Ratios are those of medians; beside that of 1F1B / ZB-H1 the simulator's, beside that of
ZB-H1 / 2BW the most that is possible: a stage that never waits.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import SGD

SYSTEMS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb_h1": {"schedule": "zb_h1"},
    "2bw": {"schedule": "1f1b", "gradient_delay": 1, "flush": False},
}
ROW = 4
"""Steps of one system, before those of the next."""
SLEEP_SECONDS = 0.05
WIDTH, LENGTH, LAYERS_PER_STAGE = 384, 128, 2
WARM_UP = 1
"""Rows."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    kind: str
    pp: int
    m: int


CASES = (Case("sleeping", 4, 4), Case("sleeping", 4, 8), Case("sleeping", 2, 4), Case("computing", 2, 4))


class SlowBackward(torch.autograd.Function):
    """The same tensor; its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(SLEEP_SECONDS)
        return gradient


class Sleeping(nn.Module):
    """x * weight: F, I and W sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and type(x) is Tensor:  # not while the model is recorded
            time.sleep(SLEEP_SECONDS)
        slow: Callable[[Tensor], Tensor] = SlowBackward.apply
        return slow(x) * slow(self.weight)


def computing() -> nn.Module:
    """A transformer layer."""
    return nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class Stack(nn.Module):
    """Layers behind a linear one, because of which the first stage's input needs a gradient, as behind an embedding."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        sleeps = case.kind == "sleeping"
        self.front = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Sleeping() if sleeps else computing() for _ in range(case.pp * (1 if sleeps else LAYERS_PER_STAGE))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def measure(rank: int, folder: str, case: Case, rows: int) -> None:
    """One rank; rank 0 writes the milliseconds of a step in each row, by schedule."""
    from fold3d import Engine, ParallelConfig

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", case.pp), rank=rank, world_size=case.pp)
    torch.manual_seed(1)
    length = LENGTH if case.kind == "computing" else 1
    batch = {"x": torch.rand(case.m, length, WIDTH)}
    engines = {}
    for name, settings in SYSTEMS.items():
        config = ParallelConfig(pp=case.pp, segments=1, micro_batches=case.m, blocks="layers", **settings)
        engines[name] = Engine(Stack(case), config, example={"x": batch["x"][:1]}, optimizer=partial(SGD, lr=0.0))
    times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for row in range(rows + WARM_UP):
        losses = {}
        for name in list(SYSTEMS)[:: 1 if row % 2 == 0 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(ROW):
                losses[name] = engines[name].step(batch).loss
            if row >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start) / ROW)
        if len({float(loss) for loss in losses.values()}) != 1:
            raise RuntimeError(f"the schedules' losses differ: {losses}")
    if rank == 0:
        Path(f"{folder}/result.json").write_text(json.dumps(times))
    for engine in engines.values():
        engine.close()
    dist.destroy_process_group()


def simulated(case: Case) -> dict[str, float]:
    """Returns 1F1B / ZB-H1 of the simulator, where F, I and W take as long and messages no time, and ZB-H1 over what a
    stage computes."""
    from fold3d import schedule

    made = [schedule.generate(name, pp=case.pp, micro_batches=case.m) for name in ("1f1b", "zb_h1")]
    first, second = (schedule.unit_timeline(one, forward=1, backward=2).makespan for one in made)
    return {"simulated": float(first / second), "most": float(second / (3 * case.m))}


def compare(case: Case, rows: int) -> dict[str, float]:
    """Starts the processes of `case`; returns medians in milliseconds, their ratios and what is predicted."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, case, rows), nprocs=case.pp)
        times = json.loads(Path(f"{folder}/result.json").read_text())
    row = {f"{name}_ms": statistics.median(times[name]) for name in SYSTEMS}
    ratios = {"1f1b_by_zb_h1": row["1f1b_ms"] / row["zb_h1_ms"], "zb_h1_by_2bw": row["zb_h1_ms"] / row["2bw_ms"]}
    return row | ratios | simulated(case)


def main() -> None:
    """Measures every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help=f"of {ROW} steps of each")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    rows = []
    columns = ["1f1b_ms", "zb_h1_ms", "2bw_ms", "1f1b_by_zb_h1", "simulated", "zb_h1_by_2bw", "most"]
    print(f"{'stages':10}{'pp':>3}{'m':>3}" + "".join(f"{name:>14}" for name in columns))
    for case in CASES:
        row = compare(case, options.rows)
        rows.append(asdict(case) | row)
        figures = "".join(f"{row[name]:14.{1 if name.endswith('_ms') else 3}f}" for name in columns)
        print(f"{case.kind:10}{case.pp:3}{case.m:3}{figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
