"""The two transports of the CPU side by side: fold3d's own TCP connections and torch's gloo groups.

    python benchmarks/transports.py [--rounds N] [--json FILE]

Two processes on this machine's loopback interface, everything in turn in one run, medians:
(a) a pipeline message of 64 B, 8 KiB, 64 KiB and 1 MiB to the other stage and one back, microseconds for one way;
(b) the sum of 64 KiB, 1 MiB and 16 MiB of gradients over two replicas, as DP.sync makes it (reduce-scatter and gather
    by fold3d's rings, over either transport), microseconds;
(c) the sum of 64 MiB over two and over four replicas, in one bucket and in eight, by fold3d's rings over TCP and by
    gloo's own all-reduce: bus bandwidth (2 (n - 1) / n of the bytes over time) and CPU seconds of a rank per GiB.
Loopback has no bandwidth limit, so this is the transports' own cost. Ratios; absolute times mean little on a shared
machine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, TIMEOUT = 2, 60.0
MESSAGES = (64, 8 << 10, 64 << 10, 1 << 20)
SUMS = (64 << 10, 1 << 20, 16 << 20)
WHOLE, BUCKETS, REPLICAS, WHOLE_ROUNDS = 64 << 20, (1, 8), (2, 4), 10
WARM_UP = 3
US = 1e6

Action = Callable[[int], None]
Table = dict[str, dict[str, float]]
"""What, as text -> transport -> microseconds."""


def messages(over_tcp: bool, stack: ExitStack) -> Action:
    """Returns what passes so many bytes on to the next stage and back."""
    from fold3d.comms.groups import Groups
    from fold3d.profile.network import tcp_messages
    from fold3d.topology import Topology

    topology = Topology(dp=1, pp=RANKS, rank=dist.get_rank())
    groups = Groups(topology, torch.device("cpu"), TIMEOUT, [], with_p2p=False)
    stack.callback(groups.close)
    if over_tcp:
        return stack.enter_context(tcp_messages(groups, TIMEOUT))
    group, first = dist.new_group(), topology.pp_rank == 0

    def pass_on(size: int) -> None:
        message = torch.zeros(size, dtype=torch.uint8)  # as tcp_messages makes its own
        other = 1 - topology.pp_rank
        for sends in (first, not first):
            if sends:
                dist.send(message, group=group, group_dst=other)
            else:
                dist.recv(message, group=group, group_src=other)

    return pass_on


def sums(over_tcp: bool, stack: ExitStack) -> Action:
    """Returns what sums so many bytes over the replicas."""
    from fold3d import _C
    from fold3d.comms.connections import connect_replicas
    from fold3d.comms.groups import Groups
    from fold3d.topology import Topology

    topology, device = Topology(dp=RANKS, pp=1, rank=dist.get_rank()), torch.device("cpu")
    groups = Groups(topology, device, TIMEOUT, [], with_p2p=not over_tcp)
    stack.callback(groups.close)
    arbiter = _C.NicArbiter("", True)
    sync = connect_replicas(topology, groups, arbiter, device, TIMEOUT, over_tcp=over_tcp)
    stack.callback(sync.close)
    steps = itertools.count(1)
    buffer = functools.cache(lambda size: torch.zeros(size // 4))

    def sum_up(size: int) -> None:
        gradients = buffer(size)
        sync.begin(next(steps), [])
        sync.reduce(0, gradients, 1.0)
        sync.wait_reduced(0)
        sync.gather(0, gradients)
        sync.wait_gathered(0)

    return sum_up


def measure(rank: int, folder: str, rounds: int) -> None:
    """One rank: everything in turn, `rounds` times; rank 0 writes the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    table: Table = {}
    with ExitStack() as stack:
        for make, sizes, ways, what in ((messages, MESSAGES, 2, "message"), (sums, SUMS, 1, "sum")):
            actions = {name: make(name == "tcp", stack) for name in ("tcp", "gloo")}
            for size in sizes:
                times: dict[str, list[float]] = {name: [] for name in actions}
                for turn in range(rounds + WARM_UP):
                    for name, action in actions.items():
                        dist.barrier()
                        start = time.perf_counter()
                        action(size)
                        if turn >= WARM_UP:
                            times[name].append((time.perf_counter() - start) / ways * US)
                table[f"{what} of {size} B"] = {name: statistics.median(values) for name, values in times.items()}
        if rank == 0:
            Path(f"{folder}/result.json").write_text(json.dumps(table))
        dist.barrier()
    dist.destroy_process_group()


def measure_bandwidth(rank: int, folder: str, ranks: int) -> None:
    """One rank: sums WHOLE bytes by fold3d's rings and by gloo; rank 0 writes (bus bytes/s, CPU s per GiB) of each."""
    from fold3d import _C
    from fold3d.comms.connections import connect_replicas
    from fold3d.comms.groups import Groups
    from fold3d.topology import Topology

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{ranks}", ranks), rank=rank, world_size=ranks)
    topology, device = Topology(dp=ranks, pp=1, rank=rank), torch.device("cpu")
    groups = Groups(topology, device, TIMEOUT, [], with_p2p=False)
    sync = connect_replicas(topology, groups, _C.NicArbiter("", True), device, TIMEOUT, over_tcp=True)
    steps = itertools.count(1)

    def by_rings(buckets: list[torch.Tensor]) -> None:
        sync.begin(next(steps), list(range(len(buckets))))
        for number, bucket in enumerate(buckets):
            sync.reduce(number, bucket, 1.0)
        for number in range(len(buckets)):
            sync.wait_gathered(number)

    def by_gloo(buckets: list[torch.Tensor]) -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    table: dict[str, dict[str, tuple[float, float]]] = {}
    for count in BUCKETS:
        buckets = [torch.zeros(WHOLE // 4 // count) for _ in range(count)]
        times: dict[str, list[float]] = {"tcp": [], "gloo": []}
        cpu = dict.fromkeys(times, 0.0)
        for turn in range(WHOLE_ROUNDS + WARM_UP):
            for name, action in (("tcp", by_rings), ("gloo", by_gloo)):
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                action(buckets)
                if turn >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
                    cpu[name] += time.process_time() - start_cpu
        bus, gibs = 2 * (ranks - 1) / ranks * WHOLE, WHOLE_ROUNDS * WHOLE / (1 << 30)
        table[f"{ranks} replicas, {count} buckets"] = {
            name: (bus / statistics.median(times[name]), cpu[name] / gibs) for name in times
        }
    if rank == 0:
        Path(f"{folder}/bandwidth{ranks}.json").write_text(json.dumps(table))
    dist.barrier()
    sync.close()
    groups.close()
    dist.destroy_process_group()


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of each size over each transport")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, options.rounds), nprocs=RANKS)
        table: Table = json.loads(Path(f"{folder}/result.json").read_text())
        whole = {}
        for ranks in REPLICAS:
            mp.spawn(measure_bandwidth, args=(folder, ranks), nprocs=ranks)
            whole |= json.loads(Path(f"{folder}/bandwidth{ranks}.json").read_text())
    print(f"{'microseconds':22}{'tcp':>10}{'gloo':>10}{'gloo / tcp':>12}")
    for what, row in table.items():
        print(f"{what:22}{row['tcp']:10.0f}{row['gloo']:10.0f}{row['gloo'] / row['tcp']:12.2f}")
    print(f"\n{WHOLE >> 20} MiB: {'GB/s tcp':>17}{'gloo':>10}{'tcp / gloo':>12}{'CPU s/GiB tcp':>15}{'gloo':>8}")
    for what, row in whole.items():
        (tcp, tcp_cpu), (gloo, gloo_cpu) = row["tcp"], row["gloo"]
        print(f"{what:22}{tcp / 1e9:5.2f}{gloo / 1e9:10.2f}{tcp / gloo:12.2f}{tcp_cpu:15.2f}{gloo_cpu:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(table | whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
