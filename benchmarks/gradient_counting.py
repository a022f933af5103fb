"""What counting gradients costs: microseconds of CPU time per parameter and micro-batch, and its part of a step.

    python -m benchmarks.gradient_counting [--json FILE]

(a) One process: backward passes over many small parameters whose gradients a Reducer counts, against the same without
    one, into the same views; taken in turns. The difference is what counting costs.
(b) Two replicas: training steps of two small GPT-2s, and what (a) makes of their parameters and micro-batches.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from fold3d import Engine, ParallelConfig
from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.reducer import Reducer
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.topology import Submesh
from fold3d.trace.coat import Coat

PARAMETERS, WIDTH, MICRO_BATCHES, PER_BUCKET = 600, 16, 8, 50
MODELS = {
    "64 wide, 1 x 32 tokens": {"n_layer": 12, "n_embd": 64, "n_positions": 32},
    "256 wide, 1 x 128 tokens": {"n_layer": 12, "n_embd": 256, "n_positions": 128},
}


# (a) one process


def counting(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Returns microseconds per parameter and micro-batch of a backward pass, with and without a Reducer."""
    parameters = {f"p{k}": nn.Parameter(torch.ones(WIDTH, dtype=dtype)) for k in range(PARAMETERS)}
    names = list(parameters)
    specs = [
        BucketSpec(
            chunk=0,
            names=tuple(names[k : k + PER_BUCKET]),
            modules=(),
            chunks=(),
            summed_over=Submesh(pp=(0,)),
            planned=0,
        )
        for k in range(0, PARAMETERS, PER_BUCKET)
    ]
    buckets = [Bucket(number, spec, parameters, 1, 0) for number, spec in enumerate(specs)]
    pushed: list[int] = []

    def push(bucket: Bucket) -> None:
        pushed.append(bucket.number)

    def step(reducer: Reducer | None) -> float:
        for bucket in buckets:
            bucket.clear()
            bucket.attach()
        if reducer is not None:
            reducer.begin(MICRO_BATCHES, [0], hold=False)
        losses = [torch.stack([p.sum() for p in parameters.values()]).sum() for _ in range(MICRO_BATCHES)]
        start = time.process_time()
        for loss in losses:
            loss.backward()
        return (time.process_time() - start) / (PARAMETERS * MICRO_BATCHES) * 1e6

    times: dict[str, list[float]] = {"plain": [], "counted": []}
    for turn in range(rounds + 3):
        plain = step(None)
        with Coat() as coat:
            reducer = Reducer(
                coat, buckets, dict.fromkeys(names, 1), lambda bucket: pushed.append(bucket.number), lambda _: False
            )
            counted = step(reducer)
        if turn >= 3:
            times["plain"].append(plain)
            times["counted"].append(counted)
    assert len(pushed) == len(buckets) * (rounds + 3), "every bucket is handed over once a step"
    both = {name: statistics.median(values) for name, values in times.items()}
    pairs = [counted - plain for plain, counted in zip(times["plain"], times["counted"], strict=True)]
    return {**both, "counting": statistics.median(pairs)}


# (b) two replicas


def train(rank: int, folder: str, sizes: dict[str, int], steps: int) -> None:
    """One of two replicas; rank 0 writes the milliseconds of a step and the number of parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_head=4, vocab_size=256, **sizes))
    ids = torch.randint(0, 256, (1, sizes["n_positions"]), generator=torch.Generator().manual_seed(1))
    batch = [{"input_ids": ids, "labels": ids} for _ in range(MICRO_BATCHES)]
    engine = Engine(
        model, ParallelConfig(dp=2, segments=1, dp_sync="zero1", micro_batches=MICRO_BATCHES), example=batch[0]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.process_time()
        engine.run(batch, lambda model, one: model(**one).loss)
        optimizer.step()
        times.append((time.process_time() - start) * 1e3)
    if rank == 0:
        count = sum(1 for _ in model.parameters())
        Path(f"{folder}/result.json").write_text(json.dumps([statistics.median(times[3:]), count]))
    engine.close()
    dist.destroy_process_group()


def main() -> None:
    """Runs both parts and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="(a): steps with and without a Reducer")
    parser.add_argument("--steps", type=int, default=12, help="(b): steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

    rows = {
        str(dtype).removeprefix("torch."): counting(dtype, options.rounds) for dtype in (torch.float32, torch.bfloat16)
    }
    print(f"(a) {PARAMETERS} parameters of {WIDTH}: microseconds per parameter and micro-batch")
    for name, row in rows.items():
        print(f"{name:10}" + "".join(f"{part} {value:6.2f}   " for part, value in row.items()))
    print(f"(b) two replicas, {MICRO_BATCHES} micro-batches, float32")
    steps: dict[str, dict[str, float]] = {}
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, args=(folder, sizes, options.steps), nprocs=2)
            milliseconds, count = json.loads(Path(f"{folder}/result.json").read_text())
        part = rows["float32"]["counting"] * count * MICRO_BATCHES / 1e3
        steps[name] = {"step_ms": milliseconds, "counting_ms": part}
        print(
            f"GPT-2 {name}, {count} parameters: {milliseconds:.0f} ms of CPU time a step, counting {part:.2f} of them "
            f"({part / milliseconds:.2%})"
        )
    if options.json:
        options.json.write_text(json.dumps({"counting": rows, "steps": steps}, indent=2) + "\n")


if __name__ == "__main__":
    main()
