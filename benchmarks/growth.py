"""What a process of fold3d's costs as replicas are added: connections, threads, memory, and what a step exchanges.

    python benchmarks/growth.py [--processes 4 8 16 32] [--pp 2] [--json FILE]

For every number of processes a job on this machine, pp stages and more and more replicas, of a model of almost nothing:
seconds to build the engine; sockets (/proc/self/fd), threads and resident memory of the process that has most, what
torch's default group has of them apart; milliseconds of the vote (`grad_norm`, once the gradients are summed) and of a
whole step, medians. Processes share this machine's cores, so times grow with them for that reason alone. Then by
formula, which tests hold against counted bytes: connections and messages of the vote up to 4096 ranks, beside those of
groups that connect all with all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, ROWS, MICRO_BATCHES = 8, 8, 4, 2
MB, MS = 1e6, 1e3
RANKS_BY_FORMULA = (64, 256, 1024, 4096)
SIZES = (8, 64, 512)
"""Of dp and pp, by formula."""
LIMIT = timedelta(minutes=20)


class Tiny(nn.Module):
    """Blocks of almost no work."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def held() -> dict[str, float]:
    """Returns this process's sockets, threads and resident megabytes."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of listing the folder itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": resident / MB,
    }


def serve(rank: int, world: int, port: int, pp: int, steps: int, pipe: Connection) -> None:
    """One process of a job; sends what it measured."""
    torch.set_num_threads(1)
    from fold3d import Engine, ParallelConfig

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    dist.barrier()
    before = held()
    config = ParallelConfig(
        dp=world // pp,
        pp=pp,
        segments=1,
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
        dp_sync="early",
        comm_timeout=LIMIT.total_seconds(),
    )
    batch = {"x": torch.ones(ROWS * MICRO_BATCHES, WIDTH)}
    make = functools.partial(torch.optim.SGD, lr=1e-3)
    pipe.send("connected")
    start = time.perf_counter()
    engine = Engine(Tiny(), config, optimizer=make, example={"x": torch.ones(ROWS, WIDTH)})
    built = time.perf_counter() - start
    pipe.send("built")
    micro_batches = [{"x": one} for one in batch["x"].split(ROWS)]
    whole, votes = [], []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        engine.step(batch)
        whole.append(time.perf_counter() - start)
    for _ in range(steps):
        engine.run(micro_batches, lambda model, one: model(**one))
        dist.barrier()  # the gradients of all are summed, or nearly
        start = time.perf_counter()
        engine.grad_norm()
        votes.append(time.perf_counter() - start)
        assert engine.optimizer is not None
        engine.optimizer.step()
    engine.flush()
    after = held()
    pipe.send(
        {
            "built": built,
            "step": statistics.median(whole[1:]) * MS,
            "vote": statistics.median(votes[1:]) * MS,
            **{f"torch's {name}": value for name, value in before.items()},
            **{name: after[name] - (before[name] if name != "memory" else 0) for name in after},
        }
    )
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


def measure(world: int, pp: int, steps: int) -> dict[str, float]:
    """Returns a row of the table: of each figure the largest of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)  # as a launcher does
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, world, store.port, pp, steps, theirs)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    with stopping(processes):
        for what in ("connected", "built"):
            say(f"{world} processes: waiting until all have {what}")
            for pipe in pipes:
                assert receive(pipe) == what
        say(f"{world} processes: {2 * steps} steps")
        rows = [receive(pipe) for pipe in pipes]
        for process in processes:
            process.join(LIMIT.total_seconds())
    return {name: max(row[name] for row in rows) for name in rows[0]}


def receive(pipe: Connection) -> Any:
    """Returns what a process sends. Raises: RuntimeError when it says nothing for long, or has ended."""
    try:
        if pipe.poll(LIMIT.total_seconds()):
            return pipe.recv()
    except EOFError:
        raise RuntimeError("a process ended; its error is above") from None
    raise RuntimeError(f"a process said nothing for {LIMIT}")


@contextlib.contextmanager
def stopping(processes: list[Any]) -> Iterator[None]:
    """Ends the processes when the body does."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def say(text: str) -> None:
    """Shows what is going on, beside the table."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


COLUMNS = {
    "built": ("built, s", ".1f"),
    "torch's sockets": ("sockets of torch", ".0f"),
    "sockets": ("of fold3d", ".0f"),
    "threads": ("threads of fold3d", ".0f"),
    "memory": ("resident, MB", ".0f"),
    "vote": ("norm, ms", ".1f"),
    "step": ("step, ms", ".1f"),
}


def by_formula(pp: int) -> None:
    """Prints what the vote takes in jobs that this machine cannot hold."""
    from fold3d.topology import Topology
    from tests.helpers.trees import connections, messages, rounds

    print(f"\nBy formula, pp={pp}: connections of the rank that has most, and the vote; in brackets with groups of all")
    print(f"{'ranks':>6}{'connections':>20}{'messages':>24}{'one after the other':>24}")
    for world in RANKS_BY_FORMULA:
        dp = world // pp
        most = max(connections(Topology(dp=dp, pp=pp, rank=rank)) for rank in range(world))
        mesh = (world - 1) + (dp - 1) + (pp - 1)
        row = (f"{most} ({mesh})", f"{messages(dp, pp)} ({world * (world - 1)})", f"{rounds(dp, pp)} ({world - 1})")
        print(f"{world:6}{row[0]:>20}{row[1]:>24}{row[2]:>24}")


def by_axis() -> None:
    """Prints what a rank has and does in a step as replicas and stages grow, in jobs that this machine cannot hold."""
    from fold3d import _C
    from fold3d.comms.tree_group import Tree
    from fold3d.schedule import Kind, generate, lower
    from tests.helpers.trees import neighbours, rounds

    def most(size: int) -> int:
        tree = Tree(size)
        return max(neighbours(tree, place) for place in range(size))

    print("\nBy formula, of the rank that has most, 1f1b with 2 pp micro-batches")
    print("small: connections of small exchanges (trees), by which results of evaluations and checkpoints go, too;")
    print("lines: of messages and rings over TCP; sent: messages to other stages in a step, and those a micro-batch;")
    print("to each: KiB that a slice of DP.sync has for each replica on an accelerator, before speeds are known; norm,")
    print("loss: exchanges of hosts that lie one after the other in a step")
    heads = ("small", "lines", "sent", "a micro-batch", "to each", "norm", "loss")
    print(f"{'dp':>5}{'pp':>5}" + "".join(f"{head:>15}" for head in heads))
    for pp in SIZES:
        micro_batches = 2 * pp
        schedule = lower(generate("1f1b", pp=pp, micro_batches=micro_batches), reduce=True)
        sends = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        sent = max(sum(action.kind in sends for action in program) for program in schedule.ranks)
        for dp in SIZES:
            to_each = _C.library_slice_bytes(dp) / (dp - 1) / 1024
            loss = rounds(1, pp) + rounds(dp, 1)
            row = (most(dp) + most(pp), 8, sent, sent / micro_batches, to_each, rounds(dp, pp), loss)
            print(f"{dp:5}{pp:5}" + "".join(f"{value:15.0f}" for value in row))


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[4, 8, 16, 32], help="multiples of pp")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--measured-only", action="store_true", help="no table by formula")
    options = parser.parse_args()
    wrong = [world for world in options.processes if world % options.pp or world < options.pp]
    if wrong:
        parser.error(f"--processes {wrong}: not multiples of --pp {options.pp}")
    rows = {}
    for world in options.processes:
        rows[world] = measure(world, options.pp, options.steps)
        heads = "".join(f"{head:>19}" for head, _ in COLUMNS.values())
        if len(rows) == 1:
            print(f"{'processes':>9}{heads}")
        print(
            f"{world:9}" + "".join(f"{rows[world][name]:19{form}}" for name, (_, form) in COLUMNS.items()), flush=True
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not options.measured_only:
        by_formula(options.pp)
        by_axis()


if __name__ == "__main__":
    main()
