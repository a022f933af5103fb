"""What the processes of (b), (c) and (e) run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.ranks import Sizes, race, replicas, stages
from benchmarks.gpu.slices import sums


def run_rank(rank: int, world: int, device: str, sizes: Sizes, folder: str, out: str) -> None:
    """One process; rank 0 writes tokens/s of the job, and bytes/s of (e), by part and system, to `out`."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    store = dist.FileStore(str(Path(folder) / "store"), world)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    found = {"sums": sums(rank, world, device, sizes)}
    for part, make, tokens in (
        ("replicas", replicas, world * sizes.tokens),
        ("stages", stages, sizes.tokens),
    ):
        systems, close = make(rank, world, device, sizes)
        seconds = race(systems, device, rounds=sizes.rounds, steps=sizes.steps)
        close()
        found[part] = {name: tokens / value for name, value in seconds.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
