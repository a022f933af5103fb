"""ZB-H1 against 1F1B on real processes: what splitting the backward saves.

    python benchmarks/zero_bubble.py [--steps N] [--json FILE]

Two kinds of stages, a row of the table for each size:

- sleeping: forward, I and W sleep, each as long, instead of computing, so that stages do not compete for the cores of a
  machine; everything else, messages and autograd included, is real;
- computing: transformer layers, one thread to a process, two processes.

Both schedules train models with the same weights, their steps in turn in the same processes; every pair's losses are
compared. The ratio is that of the medians of steps, 1F1B / ZB-H1; beside it, that of the simulator.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

SCHEDULES = ("1f1b", "zb_h1")
SLEEP_SECONDS = 0.05
WIDTH, LENGTH, LAYERS_PER_STAGE = 384, 128, 2
WARM_UP = 2


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


def measure(rank: int, folder: str, case: Case, steps: int) -> None:
    """One rank; rank 0 writes the milliseconds of every step, by schedule."""
    from fold3d import Engine, ParallelConfig

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", case.pp), rank=rank, world_size=case.pp)
    torch.manual_seed(1)
    rows = LENGTH if case.kind == "computing" else 1
    batch = [{"x": torch.rand(1, rows, WIDTH)} for _ in range(case.m)]
    engines = {}
    for name in SCHEDULES:
        config = ParallelConfig(pp=case.pp, segments=1, micro_batches=case.m, schedule=name, blocks="layers")
        engines[name] = Engine(Stack(case), config, example=batch[0])
    times: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for step in range(steps + WARM_UP):
        losses = []
        for name in SCHEDULES if step % 2 == 0 else SCHEDULES[::-1]:
            dist.barrier()
            start = time.perf_counter()
            losses.append(engines[name].run(batch, lambda model, one: model(**one)))
            if step >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
        if not torch.equal(*losses):
            raise RuntimeError(f"the schedules' losses differ: {losses}")
    if rank == 0:
        Path(f"{folder}/result.json").write_text(json.dumps(times))
    for engine in engines.values():
        engine.close()
    dist.destroy_process_group()


def simulated_ratio(case: Case) -> float:
    """Returns 1F1B / ZB-H1 of the simulator, where F, I and W take as long and messages no time."""
    from fold3d import schedule

    made = [schedule.generate(name, pp=case.pp, micro_batches=case.m) for name in SCHEDULES]
    first, second = (schedule.unit_timeline(one, forward=1, backward=2).makespan for one in made)
    return float(first / second)


def compare(case: Case, steps: int) -> dict[str, float]:
    """Starts the processes of `case`; returns both medians in milliseconds, their ratio and the simulator's."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, case, steps), nprocs=case.pp)
        times = json.loads(Path(f"{folder}/result.json").read_text())
    row = {f"{name}_ms": statistics.median(times[name]) for name in SCHEDULES}
    return row | {"ratio": row["1f1b_ms"] / row["zb_h1_ms"], "simulated": simulated_ratio(case)}


def main() -> None:
    """Measures every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each schedule")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    rows = []
    print(f"{'stages':12}{'pp':>4}{'m':>4}{'1f1b ms':>10}{'zb_h1 ms':>10}{'ratio':>8}{'simulated':>11}")
    for case in CASES:
        row = compare(case, options.steps)
        rows.append(asdict(case) | row)
        print(
            f"{case.kind:12}{case.pp:4}{case.m:4}{row['1f1b_ms']:10.1f}{row['zb_h1_ms']:10.1f}{row['ratio']:8.3f}"
            f"{row['simulated']:11.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
