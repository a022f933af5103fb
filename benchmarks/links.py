"""How much of a link DP.sync uses, and what speed it measures there, by rate and round trip.

    python -m benchmarks.links [--rates 25,125] [--rtts 0,2,10,20,50] [--sizes 8,32] [--hosts 2] [--json FILE]

Hosts are network namespaces with links of so many MB/s and round trips of so many ms, the kernel's default windows and
a queue of 20 ms (needs root). Each rank sums so many MiB over the hosts, in two buckets as an engine does it
(reduce-scatter and gather by fold3d's rings over TCP), one sum after the other. The first two of each size count
nothing, of the others the median does. The share of the link is 2 (n - 1) / n of the bytes, over time and rate.
Headers of packets take 4 to 6 %, and the two journeys of a sum a round trip in which nothing may be left to send.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cluster.testbed.hosts import Link, NamespaceHosts, address

SECRET, TIMEOUT, MB, MIB = "s" * 32, 120.0, 1e6, 1 << 20
WARM_UP, BUCKETS, QUEUE_MS = 2, 2, 20.0
LEAST_S, LEAST_ROUNDS = 3.0, 4


def run_rank(rank: int, hosts: int, sizes: list[int], rate: float, folder: Path) -> None:
    """One rank: sums of each size in turn; writes (seconds, measured bytes per second) of each size."""
    import torch

    from fold3d import _C

    peers = _C.RingPeers(rank, hosts, address(rank), SECRET)
    partial = folder / f"port{rank}.part"
    partial.write_text(str(peers.port))
    partial.rename(folder / f"port{rank}")
    following = (rank + 1) % hosts
    while not (folder / f"port{following}").exists():
        time.sleep(0.05)
    peers.connect((address(following), int((folder / f"port{following}").read_text())), TIMEOUT)
    sync = _C.BucketSync(
        rank,
        hosts,
        _C.NicArbiter("", True),
        torch.device("cpu"),
        TIMEOUT,
        f"rank {rank}",
        slice_bytes=0,
        peers=peers,
        lines=peers.lines_needed(),  # links are alike, so all ranks find the same
    )
    step, found = 0, []
    for size in sizes:
        buckets = [torch.zeros(size // 4 // BUCKETS) for _ in range(BUCKETS)]
        rounds = WARM_UP + max(LEAST_ROUNDS, round(LEAST_S / (size / rate)))
        times = []
        for _ in range(rounds):
            step += 1
            start = time.perf_counter()
            sync.begin(step, list(range(BUCKETS)))
            for number, bucket in enumerate(buckets):
                sync.reduce(number, bucket, 1.0)
            for number in range(BUCKETS):
                sync.wait_gathered(number)
            times.append(time.perf_counter() - start)
        found.append((statistics.median(times[WARM_UP:]), sync.bandwidth()))
    (folder / f"result{rank}.json").write_text(json.dumps(found))
    while not all((folder / f"result{other}.json").exists() for other in range(hosts)):
        time.sleep(0.05)
    sync.close()


def measure(rate: float, rtt_ms: float, sizes: list[int], hosts: int) -> list[tuple[float, float]]:
    """Returns (seconds, measured bytes per second) of each size, the slowest rank's and the mean of all ranks'.

    Args:
        rate: of a link, bytes per second.
    """
    link = Link(rate_mbit=rate * 8 / 1e6, rtt_ms=rtt_ms, latency_ms=QUEUE_MS, bounded_windows=False)
    with NamespaceHosts(hosts, link) as network, tempfile.TemporaryDirectory() as folder:
        environment = os.environ | network.environment()
        command = [sys.executable, "-m", "benchmarks.links", "--sizes", ",".join(str(size // MIB) for size in sizes)]
        command += ["--hosts", str(hosts), "--rates", str(rate / MB), "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen(network.command(rank, [*command, str(rank)]), env=environment) for rank in range(hosts)
        ]
        try:
            if any(rank.wait(timeout=len(sizes) * TIMEOUT) for rank in ranks):
                raise RuntimeError("a rank failed; its error is above")
        finally:
            for rank in ranks:
                rank.kill()
        found = [json.loads((Path(folder) / f"result{rank}.json").read_text()) for rank in range(hosts)]
    return [
        (max(seconds for seconds, _ in of_ranks), statistics.mean(speed for _, speed in of_ranks))
        for of_ranks in zip(*found, strict=True)
    ]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="25,125", help="MB/s of a link")
    parser.add_argument("--rtts", default="0,2,10,20,50", help="round trips in ms; 0: the machine's own")
    parser.add_argument("--sizes", default="8,32", help="MiB of a sum")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rates = [float(rate) * MB for rate in options.rates.split(",")]
    sizes = [int(size) * MIB for size in options.sizes.split(",")]
    if options.rank is not None:
        run_rank(options.rank, options.hosts, sizes, rates[0], options.folder)
        return
    rows = []
    print(f"{'MB/s':>6}{'rtt ms':>8}{'MiB':>6}{'seconds':>10}{'of the link':>13}{'speed / link':>14}")
    for rate in rates:
        for rtt in map(float, options.rtts.split(",")):
            for size, (seconds, speed) in zip(sizes, measure(rate, rtt, sizes, options.hosts), strict=True):
                share = 2 * (options.hosts - 1) / options.hosts * size / seconds / rate
                row = [rate / MB, rtt, size // MIB, seconds, share, speed / rate]
                rows.append(row)
                print("{:6g}{:8g}{:6}{:10.3f}{:13.2f}{:14.2f}".format(*row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
