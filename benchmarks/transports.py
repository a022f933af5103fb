"""The two transports of the CPU side by side: fold3d's own TCP connections and torch's gloo groups.

    python benchmarks/transports.py [--rounds N] [--json FILE]

Two processes on this machine's loopback interface, everything in turn in one run, medians:
(a) a pipeline message of 64 B, 8 KiB, 64 KiB and 1 MiB to the other stage and one back, microseconds for one way;
(b) the sum of 64 KiB, 1 MiB and 16 MiB of gradients over two replicas, as DP.sync makes it (reduce-scatter and gather
    by fold3d's rings, over either transport), microseconds.
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
WARM_UP = 3
US = 1e6

Action = Callable[[int], None]
Table = dict[str, dict[str, float]]
"""What, as text -> transport -> microseconds."""


def messages(over_tcp: bool, stack: ExitStack) -> Action:
    """Returns what passes so many bytes on to the next stage and back."""
    from fold3d.comms.groups import Groups
    from fold3d.profile.network_probe import tcp_messages
    from fold3d.topology import Topology

    topology = Topology(dp=1, pp=RANKS, rank=dist.get_rank())
    groups = Groups(topology, torch.device("cpu"), TIMEOUT, [], with_p2p=False)
    stack.callback(groups.close)
    if over_tcp:
        return stack.enter_context(tcp_messages(topology, groups, TIMEOUT))
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
    from fold3d.comms.groups import Groups
    from fold3d.comms.rings import connect_replicas
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


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of each size over each transport")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, options.rounds), nprocs=RANKS)
        table: Table = json.loads(Path(f"{folder}/result.json").read_text())
    print(f"{'microseconds':22}{'tcp':>10}{'gloo':>10}{'gloo / tcp':>12}")
    for what, row in table.items():
        print(f"{what:22}{row['tcp']:10.0f}{row['gloo']:10.0f}{row['gloo'] / row['tcp']:12.2f}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
