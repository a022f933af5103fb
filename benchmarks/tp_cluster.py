"""Tensor parallelism inside of hosts, replicas and stages across them: dp=2 x tp=2 x pp=2 on four hosts of two ranks.

    python -m benchmarks.tp_cluster [--ratio 1.0] [--card 200] [--steps 6] [--json FILE]
    python -m benchmarks.tp_cluster --across         # the ranks of a group on two hosts: what the warning is about

Hosts are network namespaces (needs root) with cards of `--card` Mbit/s, over which PP.sync and DP.sync travel; inside
of a host TP.sync has a link of its own, whose speed makes it take `--ratio` times as long as computing. Computing is
sleeping, as in benchmarks/cluster: a block's forward and backward occupy the rank for a time that follows its samples
and its part of the weights, so that two cores can play eight accelerators. Sums, gradients and activations are real.

Ways of hiding TP.sync run one after the other on the same hosts: "none", "sub", and "auto", which plans. For each: the
step (median of the slowest rank's), its account, the link's share of it by the planner, how long a sum of TP.sync took,
and what left a host by its card, which must not have TP.sync in it.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cluster.on_rank.answering import answer_requests
from benchmarks.cluster.on_rank.worker import sent_bytes
from benchmarks.cluster.testbed.hosts import Link, NamespaceHosts
from benchmarks.cluster.testbed.ranks import Ranks

DP, TP, PP = 2, 2, 2
RANKS = DP * TP * PP
MICRO_BATCHES, SAMPLES, TOKENS, WIDTH, INNER, BLOCKS = 4, 8, 16, 256, 64, 8
FORWARD_S, BACKWARD_S = 0.024, 0.048
"""Of a region with all of its weights, for a micro-batch."""
WARM_UP = 4
WAYS = ("none", "sub", "auto")
SHOWN = (
    *("compute_ms", "tp_exposed_ms", "tp_hidden_ms", "bubble_ms", "pp_exposed_ms", "dp_exposed_ms"),
    *("predicted_step_ms", "predicted_tp_exposed_ms"),
)
"""Of a step's account."""
LO_MTU = 1500
BURST_S = 0.002
"""What an idle link inside of a host sends at once: with the usual 4 ms a sum would get a third for nothing."""


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Region(nn.Module):
    """Two matrices, of which ranks share the inner units, that take a given time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        share = inner.shape[-1] / INNER * x.shape[0] / SAMPLES
        occupied: Tensor = _Occupy.apply(inner, share * FORWARD_S, share * BACKWARD_S)  # type: ignore[no-untyped-call]
        y: Tensor = self.down(torch.tanh(occupied))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Region(), Region()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        y: Tensor = x + self.second(x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(replica: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return {"x": torch.randn(MICRO_BATCHES * SAMPLES, TOKENS, WIDTH, generator=generator)}


def train(way: str, steps: int) -> dict[str, Any]:
    """Runs on a rank; returns what it measured."""
    from fold3d import Engine, ParallelConfig

    torch.manual_seed(0)
    model = Model()
    config = ParallelConfig(dp=DP, tp=TP, pp=PP, micro_batches=MICRO_BATCHES, tp_overlap=way, blocks="layers")
    replica = dist.get_rank() // (TP * PP)
    example = {"x": batch(replica)["x"][:SAMPLES]}
    engine = Engine(model, config, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), example=example)
    times, losses = [], []
    engine.record_tp_sync(True)
    sent = 0
    for number in range(steps + WARM_UP):
        if number == WARM_UP:
            dist.barrier()
            sent = sent_bytes("eth0") or 0
        start = time.perf_counter()
        output = engine.step(batch(replica))
        losses.append(float(output.loss))
        times.append(time.perf_counter() - start)
    breakdown = output.breakdown
    sums = [(end - begin) / 1e6 for lane, _, begin, end, _ in breakdown.records if lane == "tp_sync"]
    engine.flush()
    dist.barrier()
    found = {
        "times": times[WARM_UP:],
        "losses": losses,
        "account": breakdown.log(dp=DP, pp=PP, tp=TP),
        "sum_ms": statistics.median(sums),
        "tp_bytes": breakdown.tp_bytes,
        "card_bytes": ((sent_bytes("eth0") or 0) - sent) / steps,
        "way": dict(engine.strategy.settings)["tp_overlap"],
        "strategy": str(engine.strategy),
    }
    dist.barrier()
    engine.close()
    return found


def work(rank: int) -> None:
    """A rank: answers requests, a line of JSON each, from its standard input."""
    import logging

    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    torch.set_num_threads(1)
    answer_requests(
        lambda request: train(request["way"], request["steps"]),
        join=lambda: dist.init_process_group("gloo", rank=rank, world_size=RANKS),
    )


def limit_inside(hosts: NamespaceHosts, count: int, bytes_per_second: float) -> None:
    """Gives what stays within each host a link of its own: so much for each of its ranks, which share one device."""
    link = Link(rate_mbit=8e-6 * bytes_per_second * TP, burst_s=BURST_S)
    for host in range(count):
        for command in (["ip", "link", "set", "lo", "mtu", str(LO_MTU)], link.shape("lo").split()):
            subprocess.run(hosts.command(host, command), check=True, timeout=30.0)


def computing() -> float:
    """Seconds that a rank computes in a step."""
    return MICRO_BATCHES * BLOCKS / PP * 2 * (FORWARD_S + BACKWARD_S) / TP


def step_seconds(answers: list[dict[str, Any]]) -> float:
    """Returns the median of the slowest rank's steps."""
    found: float = statistics.median(map(max, zip(*(answer["times"] for answer in answers), strict=True)))
    return found


def row(way: str, step: float, answer: dict[str, Any]) -> str:
    """Returns what rank 0 measured, in words."""
    account = answer["account"]
    parts = [f"{name[:-3].replace('_', ' ')} {account[name]:.0f}" for name in SHOWN if name in account]
    return (
        f"{way:4} -> {answer['way']:4} step {1e3 * step:7.1f} ms: {', '.join(parts)}; a sum takes "
        f"{answer['sum_ms']:.2f} ms; sent: TP.sync {answer['tp_bytes'] / 1e6:.2f} MB a rank, by a card "
        f"{answer['card_bytes'] / 1e6:.2f} MB"
    )


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=1.0, help="TP.sync over computing")
    parser.add_argument("--card", type=float, default=200.0, help="Mbit/s of a host's card")
    parser.add_argument("--across", action="store_true", help="neighbours on different hosts")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank)
        return
    count = RANKS // TP
    size = 4 * SAMPLES * TOKENS * WIDTH
    sums = MICRO_BATCHES * BLOCKS // PP * 4
    inside = sums * 2 * (TP - 1) / TP * size / (options.ratio * computing())
    found: dict[str, Any] = {}
    root = str(Path(__file__).resolve().parents[1])
    with NamespaceHosts(count, Link(rate_mbit=options.card)) as hosts, tempfile.TemporaryDirectory() as folder:
        limit_inside(hosts, count, inside)
        environment = {**os.environ, **hosts.environment(), "PYTHONPATH": root}
        of_rank = [rank % count if options.across else rank // TP for rank in range(RANKS)]
        commands = [
            hosts.command(of_rank[rank], [sys.executable, __file__, "--rank", str(rank)]) for rank in range(RANKS)
        ]
        with Ranks(commands, environment, Path(folder)) as ranks:
            for way in options.ways:
                found[way] = ranks.ask({"way": way, "steps": options.steps}, 600.0)
        told = (Path(folder) / "output0.txt").read_text()
    print(
        f"{count} hosts of {TP} ranks, cards of {options.card:g} Mbit/s, {8e-6 * inside:.1f} Mbit/s a rank inside; "
        f"a rank computes {1e3 * computing():.0f} ms a step, its TP.sync takes {options.ratio:g} times as long"
    )
    for line in told.splitlines():
        if "tp_overlap:" in line or "spread over" in line:
            print(line.strip())
    steps = {way: step_seconds(answers) for way, answers in found.items()}
    for way, answers in found.items():
        print(row(way, steps[way], answers[0]))
    plain = found[options.ways[0]][0]["losses"]
    apart = max(abs(a - b) for answers in found.values() for a, b in zip(answers[0]["losses"], plain, strict=True))
    print(f"losses differ by {apart:.1e}")
    if options.json:
        options.json.write_text(json.dumps({"inside": inside, "steps": steps, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
